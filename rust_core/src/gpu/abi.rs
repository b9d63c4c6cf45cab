//! Declarations of what vendors' libraries take and return, checked in: no header and no generator is needed to build.
//!
//! Each is held to the vendors' own words by `make test-abi`: Debian's HIP headers, AMD's Python bindings, the headers
//! that come with torch's CUDA wheels. Only what keeps its layout over the versions is declared. `hipDeviceProp_t` does
//! not (792 bytes in HIP 5.2, 1472 in 7.15), so what it says is asked for one attribute at a time.

pub mod ccl;
pub mod device;
pub mod verbs;

/// An integer that a library returns or takes. Values that this version does not know stay what they are: a Rust enum
/// would make them undefined behaviour. Each value carries the vendors' names for it, HIP's first.
macro_rules! open_enum {
    (
        $(#[$doc:meta])*
        pub struct $Name:ident($repr:ty) {
            $( $(#[$value_doc:meta])* $VALUE:ident = $value:literal [$($vendor:literal),*], )*
        }
    ) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $Name(pub $repr);

        #[allow(missing_docs, reason = "the vendors document their values")]
        impl $Name {
            $( $(#[$value_doc])* pub const $VALUE: Self = Self($value); )*
        }

        impl $Name {
            /// Every declared value with the vendors' names for it.
            pub const DECLARED: &'static [(i64, &'static [&'static str])] =
                &[$( ($value as i64, &[$($vendor),*]) ),*];
        }

        impl std::fmt::Debug for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match *self {
                    $( Self::$VALUE => f.write_str(stringify!($VALUE)), )*
                    #[allow(unreachable_patterns, reason = "an enum may declare all values of its type")]
                    Self(other) => write!(f, concat!(stringify!($Name), "({})"), other),
                }
            }
        }
    };
}
pub(crate) use open_enum;
