//! What a collective reads and writes, checked before the library is called.

use crate::gpu::abi::ccl::DataType;
use crate::gpu::{GpuError, GpuResult, GpuRuntime, PointerKind};

/// A range of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where it begins.
    pub address: u64,
    /// How long it is.
    pub bytes: usize,
}

/// Bytes of an element; `None` for a type that this version does not know.
pub const fn width_of(dtype: DataType) -> Option<usize> {
    match dtype {
        DataType::INT8 | DataType::UINT8 | DataType::FLOAT8_E4M3 | DataType::FLOAT8_E5M2 => Some(1),
        DataType::FLOAT16 | DataType::BFLOAT16 => Some(2),
        DataType::INT32 | DataType::UINT32 | DataType::FLOAT32 => Some(4),
        DataType::INT64 | DataType::UINT64 | DataType::FLOAT64 => Some(8),
        _ => None,
    }
}

impl Buffer {
    /// How many elements it holds.
    ///
    /// # Errors
    /// The type is unknown, or the range holds no whole number of it, none, or begins inside one.
    pub fn count(self, dtype: DataType) -> GpuResult<usize> {
        let width =
            width_of(dtype).ok_or_else(|| GpuError::Invalid(format!("elements of type {dtype:?}")))?;
        let Self { address, bytes } = self;
        if bytes == 0 || !bytes.is_multiple_of(width) || !address.is_multiple_of(width as u64) {
            return Err(GpuError::Invalid(format!(
                "{bytes} bytes at {address:#x} are no elements of {width} bytes each"
            )));
        }
        address.checked_add(bytes as u64).ok_or_else(|| {
            GpuError::Invalid(format!("{bytes} bytes at {address:#x} do not end in the address space"))
        })?;
        Ok(bytes / width)
    }

    /// That it is memory of that device, and inside one allocation.
    ///
    /// # Errors
    /// It is not. Where the runtime cannot say, it counts as such.
    pub fn is_on(self, runtime: &dyn GpuRuntime, ordinal: u32) -> GpuResult<()> {
        if !runtime.capabilities().pointer_attributes {
            return Ok(());
        }
        let wrong = |what: String| {
            let Self { address, bytes } = self;
            Err(GpuError::Invalid(format!(
                "{bytes} bytes at {address:#x} are {what}, not of device {ordinal}"
            )))
        };
        let info = runtime.pointer(self.address)?;
        match (info.kind, info.ordinal) {
            (PointerKind::Host, _) => return wrong("memory of the host".into()),
            (PointerKind::Device, Some(other)) if other != ordinal => {
                return wrong(format!("of device {other}"));
            }
            _ => {}
        }
        // Memory that the runtime knows as several allocations in a row (torch's expandable segments) ends with one of
        // them: only what begins in none is refused for sure, which was done above.
        match runtime.allocation_of(self.address) {
            Ok(whole) if !whole.contains(&self.address) => wrong("in no allocation".into()),
            _ => Ok(()),
        }
    }
}

/// That one buffer is `times` as long as another.
pub fn fits(whole: Buffer, part: Buffer, times: usize, what: &str) -> GpuResult<()> {
    if part.bytes.checked_mul(times) == Some(whole.bytes) {
        return Ok(());
    }
    let (has, wants) = (whole.bytes, part.bytes);
    Err(GpuError::Invalid(format!("{what} has {has} bytes where it needs {times} times {wants}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_no_whole_elements_is_refused_before_any_call() {
        let count = |address, bytes, dtype| Buffer { address, bytes }.count(dtype);
        assert_eq!(count(0x1000, 12, DataType::FLOAT32).expect("three"), 3);
        assert_eq!(count(0x1002, 4, DataType::BFLOAT16).expect("two"), 2);
        for (address, bytes, dtype) in [
            (0x1000, 0, DataType::FLOAT32),
            (0x1000, 13, DataType::FLOAT32),
            (0x1002, 12, DataType::FLOAT32),
            (0x1000, 12, DataType(77)),
            (u64::MAX - 3, 8, DataType::FLOAT32),
        ] {
            assert!(count(address, bytes, dtype).is_err(), "{bytes} at {address:#x} of {dtype:?}");
        }
    }

    #[test]
    fn the_whole_of_a_collective_is_as_long_as_its_parts() {
        let buffer = |bytes| Buffer { address: 0x1000, bytes };
        assert!(fits(buffer(24), buffer(8), 3, "receive").is_ok());
        assert!(fits(buffer(24), buffer(usize::MAX), 3, "receive").is_err(), "no overflow");
        let error = fits(buffer(25), buffer(8), 3, "receive").expect_err("one too many");
        assert_eq!(error.to_string(), "receive has 25 bytes where it needs 3 times 8");
    }
}
