//! Deliberate defects for the tests of recovery, compiled in only with the feature `mutants`.

/// Whether `SKY_MONARCH_MUTANT` selects the defect `name`; always false in a build without the feature.
#[cfg(feature = "mutants")]
pub fn is_on(name: &str) -> bool {
    std::env::var("SKY_MONARCH_MUTANT").is_ok_and(|chosen| chosen == name)
}

/// Whether `SKY_MONARCH_MUTANT` selects the defect `name`; always false in a build without the feature.
#[cfg(not(feature = "mutants"))]
pub const fn is_on(_name: &str) -> bool {
    false
}

/// Panics where the defect `name` is selected and `now` is true; does nothing in a build without the feature.
#[allow(clippy::panic, reason = "the defect itself")]
pub fn panic_if(name: &str, now: bool) {
    if now && is_on(name) {
        panic!("the defect {name} was chosen");
    }
}
