//! Tables of a library's entries: required ones, and optional ones that say by themselves what the library can do.

/// An entry as a table declares it.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Field of the table.
    pub field: &'static str,
    /// Names by vendor, in the table's order of vendors.
    pub symbols: &'static [&'static str],
    /// Whether a library without it is refused.
    pub required: bool,
}

/// Declares a table. Each entry has one symbol a vendor: which one is looked up is chosen when it is loaded.
macro_rules! vendor_table {
    (
        $(#[$doc:meta])*
        pub struct $Table:ident {
            required { $( $(#[$rdoc:meta])* $rname:ident [$($rsym:literal),+] : fn($($rarg:ty),* $(,)?) $(-> $rret:ty)?; )* }
            optional { $( $(#[$odoc:meta])* $oname:ident [$($osym:literal),+] : fn($($oarg:ty),* $(,)?) $(-> $oret:ty)?; )* }
        }
    ) => {
        $(#[$doc])*
        #[allow(missing_docs, reason = "the vendors document their entries; the fields have their names")]
        pub struct $Table {
            $( $(#[$rdoc])* pub $rname: unsafe extern "C" fn($($rarg),*) $(-> $rret)?, )*
            $( $(#[$odoc])* pub $oname: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>, )*
        }

        impl $Table {
            /// Every entry.
            pub const ENTRIES: &'static [$crate::gpu::table::Entry] = &[
                $( $crate::gpu::table::Entry {
                    field: stringify!($rname), symbols: &[$($rsym),+], required: true,
                }, )*
                $( $crate::gpu::table::Entry {
                    field: stringify!($oname), symbols: &[$($osym),+], required: false,
                }, )*
            ];

            /// Look up every entry under the vendor's name for it.
            ///
            /// # Errors
            /// `MissingSymbol` for the first required entry that the library lacks.
            ///
            /// # Panics
            /// With a vendor that the table does not have.
            pub fn load(
                library: &$crate::gpu::library::Library,
                vendor: usize,
            ) -> $crate::gpu::error::GpuResult<Self> {
                let missing = |symbol| $crate::gpu::error::GpuError::MissingSymbol {
                    path: library.path().to_owned(),
                    symbol,
                    version: None,
                };
                Ok(Self {
                    $( $rname: {
                        let symbol = [$($rsym),+][vendor];
                        let address = library.symbol(symbol).ok_or_else(|| missing(symbol))?;
                        // SAFETY: the declaration is the vendor's for this symbol; `make test-abi` holds it to that.
                        unsafe {
                            std::mem::transmute::<
                                *mut std::ffi::c_void,
                                unsafe extern "C" fn($($rarg),*) $(-> $rret)?,
                            >(address)
                        }
                    }, )*
                    $( $oname: library.symbol([$($osym),+][vendor]).map(|address| {
                        // SAFETY: as above.
                        unsafe {
                            std::mem::transmute::<
                                *mut std::ffi::c_void,
                                unsafe extern "C" fn($($oarg),*) $(-> $oret)?,
                            >(address)
                        }
                    }), )*
                })
            }
        }
    };
}

pub mod ccl;
pub mod device;
pub mod verbs;
