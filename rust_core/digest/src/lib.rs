//! CRC-64/NVME of every byte that heals. `crc-fast` is generic, and so compiled with whoever calls it: that must not be a
//! crate that is built for development, where it would be slower than the network. Here it is not.

use std::fmt;

use crc_fast::CrcAlgorithm;

/// Of bytes that come in parts.
#[derive(Clone)]
pub struct Digest(crc_fast::Digest);

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({:016x})", self.value())
    }
}

impl Default for Digest {
    fn default() -> Self {
        Self(crc_fast::Digest::new(CrcAlgorithm::Crc64Nvme))
    }
}

impl Digest {
    /// Goes on with `part`.
    #[inline(never)]
    pub fn add(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    /// Of all parts so far.
    #[inline(never)]
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_the_catalogue_of_crcs_says() {
        let mut digest = Digest::default();
        assert_eq!(digest.value(), 0);
        digest.add(b"123456789");
        assert_eq!(digest.value(), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn parts_count_as_the_whole() {
        let bytes: Vec<u8> = (0..100_000u32).map(|number| (number * 31 % 251) as u8).collect();
        let (mut whole, mut parts) = (Digest::default(), Digest::default());
        whole.add(&bytes);
        for part in bytes.chunks(777) {
            parts.add(part);
        }
        assert_eq!(whole.value(), parts.value());
        parts.add(&[0]);
        assert_ne!(whole.value(), parts.value(), "length counts");
    }
}
