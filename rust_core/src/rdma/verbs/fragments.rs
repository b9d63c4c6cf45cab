//! A range cut into messages that a device takes: pairs of what lies here and what lies there.

use super::super::memory::Segment;

/// Largest message: what is done is hashed while the next ones are under way.
const MESSAGE: usize = 1 << 20;

/// A segment and the key that a device knows it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) struct Keyed {
    pub segment: Segment,
    pub key: u32,
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) struct Fragment {
    pub mine: Keyed,
    pub their_address: usize,
    pub their_key: u32,
}

/// Pairs up `mine` and `theirs`, in order, in messages of at most `most` bytes; as much as both have.
pub(super) fn fragments(mine: &[Keyed], theirs: &[Keyed], most: u32) -> Vec<Fragment> {
    let most = MESSAGE.min(most as usize).max(1);
    let mut found = Vec::new();
    let (mut mine, mut theirs) = (mine.iter().copied(), theirs.iter().copied());
    let (mut here, mut there) = (mine.next(), theirs.next());
    while let (Some(left), Some(right)) = (&mut here, &mut there) {
        let length = left.segment.length.min(right.segment.length).min(most);
        if length > 0 {
            found.push(Fragment {
                mine: Keyed { segment: Segment { address: left.segment.address, length }, key: left.key },
                their_address: right.segment.address,
                their_key: right.key,
            });
        }
        for part in [&mut left.segment, &mut right.segment] {
            part.address += length;
            part.length -= length;
        }
        if left.segment.length == 0 {
            here = mine.next();
        }
        if right.segment.length == 0 {
            there = theirs.next();
        }
    }
    found
}

/// Takes `length` bytes off the front.
pub(super) fn take(parts: &mut Vec<Keyed>, length: u64) -> Vec<Keyed> {
    let (mut taken, mut left) = (Vec::new(), usize::try_from(length).unwrap_or(usize::MAX));
    while left > 0 && !parts.is_empty() {
        let Keyed { segment: part, key } = &mut parts[0];
        let count = part.length.min(left);
        taken.push(Keyed { segment: Segment { address: part.address, length: count }, key: *key });
        part.address += count;
        part.length -= count;
        left -= count;
        if part.length == 0 {
            parts.remove(0);
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyed(address: usize, length: usize, key: u32) -> Keyed {
        Keyed { segment: Segment { address, length }, key }
    }

    #[test]
    fn messages_cover_what_is_cut_differently_on_both_sides_and_are_never_too_long() {
        let mine = [keyed(100, 7, 1), keyed(500, 0, 2), keyed(200, 5, 3)];
        let theirs = [keyed(1000, 3, 10), keyed(2000, 9, 20)];
        let found: Vec<_> = fragments(&mine, &theirs, 4)
            .iter()
            .map(|one| {
                (
                    one.mine.segment.address,
                    one.mine.segment.length,
                    one.mine.key,
                    one.their_address,
                    one.their_key,
                )
            })
            .collect();
        let expected =
            [(100, 3, 1, 1000, 10), (103, 4, 1, 2000, 20), (200, 4, 3, 2004, 20), (204, 1, 3, 2008, 20)];
        assert_eq!(found, expected);
        assert_eq!(fragments(&mine, &[], 4), []);
    }

    #[test]
    fn a_port_that_takes_large_messages_still_gets_them_in_pieces_that_can_be_hashed_meanwhile() {
        let range = [keyed(0x1000, 3 * MESSAGE + 1, 1)];
        let lengths: Vec<usize> =
            fragments(&range, &range, u32::MAX).iter().map(|one| one.mine.segment.length).collect();
        assert_eq!(lengths, [MESSAGE, MESSAGE, MESSAGE, 1]);
    }

    #[test]
    fn what_is_taken_is_gone_from_the_rest() {
        let mut parts = vec![keyed(0, 5, 1), keyed(100, 5, 2)];
        assert_eq!(take(&mut parts, 7), [keyed(0, 5, 1), keyed(100, 2, 2)]);
        assert_eq!(parts, [keyed(102, 3, 2)]);
        assert_eq!(take(&mut parts, 9), [keyed(102, 3, 2)]);
        assert!(parts.is_empty() && take(&mut parts, 1).is_empty());
    }
}
