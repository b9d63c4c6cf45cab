//! Which devices a process may use, by the masks in its environment.
//!
//! `ROCR_VISIBLE_DEVICES` filters first, by index or by `GPU-` and unique id; `HIP_VISIBLE_DEVICES`, or
//! `CUDA_VISIBLE_DEVICES` as an alias of it, then indexes *inside* what is left. Two that both count from the whole host
//! leave no device at all, which is the commonest way to lose them.

use super::error::{GpuError, GpuResult};

/// The masks of an environment; `None` where a variable is not set, which is all devices, where `""` is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Masks {
    /// `ROCR_VISIBLE_DEVICES`.
    pub rocr: Option<String>,
    /// `HIP_VISIBLE_DEVICES`.
    pub hip: Option<String>,
    /// `CUDA_VISIBLE_DEVICES`.
    pub cuda: Option<String>,
}

impl Masks {
    /// Those of this process.
    pub fn of_environment() -> Self {
        let read = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Self {
            rocr: read("ROCR_VISIBLE_DEVICES"),
            hip: read("HIP_VISIBLE_DEVICES"),
            cuda: read("CUDA_VISIBLE_DEVICES"),
        }
    }

    /// The devices of an AMD host that are left, as indices into `uuids` (unique ids as hexadecimal digits, in the
    /// driver's order), in the order in which the process counts them.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] where a mask names a device that is not there, names one twice, or where the masks of HIP
    /// and CUDA differ: what the runtimes make of these depends on their version, and is never what was meant.
    pub fn visible(&self, uuids: &[impl AsRef<str>]) -> GpuResult<Vec<usize>> {
        let all: Vec<usize> = (0..uuids.len()).collect();
        let kept = match &self.rocr {
            None => all,
            Some(mask) => select("ROCR_VISIBLE_DEVICES", mask, &all, Some(uuids), "this host has")?,
        };
        let (name, mask) = match (&self.hip, &self.cuda) {
            (None, None) => return Ok(kept),
            (Some(hip), Some(cuda)) if tokens(hip).ne(tokens(cuda)) => {
                return Err(GpuError::Invalid(format!(
                    "HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} name different devices; set one of them"
                )));
            }
            (Some(hip), _) => ("HIP_VISIBLE_DEVICES", hip),
            (None, Some(cuda)) => ("CUDA_VISIBLE_DEVICES", cuda),
        };
        let inside = match &self.rocr {
            Some(mask) => format!("ROCR_VISIBLE_DEVICES={mask} leaves"),
            None => "this host has".into(),
        };
        select(name, mask, &kept, None::<&[String]>, &inside)
    }
}

fn tokens(mask: &str) -> impl Iterator<Item = &str> {
    mask.split(',').map(str::trim).filter(|token| !token.is_empty())
}

/// The devices of `among` that a mask names, by position in it or, where `uuids` are given, by unique id.
fn select(
    name: &str,
    mask: &str,
    among: &[usize],
    uuids: Option<&[impl AsRef<str>]>,
    whose: &str,
) -> GpuResult<Vec<usize>> {
    let mut selected = Vec::new();
    for token in tokens(mask) {
        let by_id = token.get(..4).filter(|head| head.eq_ignore_ascii_case("GPU-")).map(|_| &token[4..]);
        let device = match (by_id, uuids) {
            (Some(id), Some(uuids)) => uuids
                .iter()
                .position(|uuid| uuid.as_ref().eq_ignore_ascii_case(id))
                .ok_or_else(|| {
                GpuError::Invalid(format!("{name}={mask} names {token}, which no device of this host has"))
            })?,
            (Some(_), None) => {
                return Err(GpuError::Invalid(format!(
                    "{name}={mask} names a device by its unique id, which only ROCR_VISIBLE_DEVICES does"
                )));
            }
            (None, _) => {
                let index = token.parse::<usize>().map_err(|_| {
                    GpuError::Invalid(format!("{name}={mask}: {token:?} is not the index of a device"))
                })?;
                *among.get(index).ok_or_else(|| {
                    GpuError::Invalid(format!(
                        "{name}={mask} names device {index}, and {whose} {} device{}{}",
                        among.len(),
                        if among.len() == 1 { "" } else { "s" },
                        if whose.starts_with("ROCR") {
                            ", counted from 0 inside that mask; set only one of them"
                        } else {
                            ""
                        },
                    ))
                })?
            }
        };
        if selected.contains(&device) {
            return Err(GpuError::Invalid(format!("{name}={mask} names one device twice")));
        }
        selected.push(device);
    }
    Ok(selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuids() -> Vec<String> {
        (0..8).map(|index| format!("{:016x}", 0xa0_u64 + index)).collect()
    }

    fn masks(rocr: Option<&str>, hip: Option<&str>, cuda: Option<&str>) -> Masks {
        let own = |mask: Option<&str>| mask.map(str::to_owned);
        Masks { rocr: own(rocr), hip: own(hip), cuda: own(cuda) }
    }

    #[test]
    fn every_combination_of_masks_on_eight_devices_is_either_what_both_name_or_one_clear_refusal() {
        let values = [None, Some(""), Some("0"), Some("0,1"), Some("2,3")];
        let named = |mask: Option<&str>, among: &[usize]| -> Option<Vec<usize>> {
            let Some(mask) = mask else { return Some(among.to_vec()) };
            mask.split(',')
                .filter(|token| !token.is_empty())
                .map(|token| among.get(token.parse::<usize>().expect("a number")).copied())
                .collect()
        };
        let mut refused = 0;
        for rocr in values {
            for hip in values {
                for cuda in values {
                    let all: Vec<usize> = (0..8).collect();
                    let inner = if hip.is_some() { hip } else { cuda };
                    let conflict = hip.is_some() && cuda.is_some() && hip != cuda;
                    let wanted = named(rocr, &all).and_then(|kept| named(inner, &kept)).filter(|_| !conflict);
                    match (masks(rocr, hip, cuda).visible(&uuids()), wanted) {
                        (Ok(devices), Some(wanted)) => {
                            assert_eq!(devices, wanted, "{rocr:?} {hip:?} {cuda:?}")
                        }
                        (Err(error), None) => {
                            refused += 1;
                            let text = error.to_string();
                            assert!(
                                text.contains("set one of them") || text.contains("names device"),
                                "{text}"
                            );
                        }
                        (got, wanted) => panic!("{rocr:?} {hip:?} {cuda:?}: {got:?}, wanted {wanted:?}"),
                    }
                }
            }
        }
        assert!(refused > 60, "{refused}");
    }

    #[test]
    fn a_mask_of_hip_counts_inside_that_of_rocr_and_the_message_says_so() {
        assert_eq!(masks(Some("2,3"), Some("1"), None).visible(&uuids()).expect("a device"), [3]);
        let error = masks(Some("2,3"), Some("2,3"), None).visible(&uuids()).expect_err("there are two");
        assert_eq!(
            error.to_string(),
            "HIP_VISIBLE_DEVICES=2,3 names device 2, and ROCR_VISIBLE_DEVICES=2,3 leaves 2 devices, counted from 0 \
             inside that mask; set only one of them"
        );
    }

    #[test]
    fn rocr_takes_unique_ids_and_hip_does_not() {
        let id = "GPU-00000000000000A5";
        assert_eq!(masks(Some(id), None, None).visible(&uuids()).expect("a device"), [5]);
        assert_eq!(
            masks(Some("GPU-00000000000000a5,0"), Some("1"), None).visible(&uuids()).expect("a device"),
            [0]
        );
        assert!(masks(None, Some(id), None).visible(&uuids()).is_err());
        assert!(masks(Some("GPU-ffff"), None, None).visible(&uuids()).is_err());
    }

    #[test]
    fn a_mask_that_is_not_one_is_refused() {
        for mask in ["x", "-1", "1,1", "8", "0x1", "99999999999999999999"] {
            assert!(masks(None, Some(mask), None).visible(&uuids()).is_err(), "{mask}");
            assert!(masks(Some(mask), None, None).visible(&uuids()).is_err(), "{mask}");
        }
    }
}
