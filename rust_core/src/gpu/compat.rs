//! Vendors' names for what is below, so that code written for one runs on either.

pub mod cuda;
