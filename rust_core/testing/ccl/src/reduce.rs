//! Reductions of the types that tests use: int32, float32, bfloat16.

const INT32: i32 = 2;
const FLOAT32: i32 = 7;
const BFLOAT16: i32 = 9;
const AVG: i32 = 4;

/// Bytes of an element; `None` for an unknown type.
pub fn width(dtype: i32) -> Option<usize> {
    match dtype {
        0 | 1 | 10 | 11 => Some(1),
        6 | BFLOAT16 => Some(2),
        INT32 | 3 | FLOAT32 => Some(4),
        4 | 5 | 8 => Some(8),
        _ => None,
    }
}

/// Whether it can be reduced here.
pub fn knows(dtype: i32, op: i32) -> bool {
    matches!(dtype, INT32 | FLOAT32 | BFLOAT16) && (0..=AVG).contains(&op)
}

fn from_bfloat16(bytes: &[u8]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
}

/// To the nearest, ties to even.
fn to_bfloat16(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    if value.is_nan() {
        return ((bits >> 16) as u16 | 0x40).to_le_bytes();
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).to_le_bytes()[..2].try_into().unwrap()
}

fn float(a: f32, b: f32, op: i32) -> f32 {
    match op {
        1 => a * b,
        2 => a.max(b),
        3 => a.min(b),
        _ => a + b,
    }
}

fn integer(a: i32, b: i32, op: i32) -> i32 {
    match op {
        1 => a.wrapping_mul(b),
        2 => a.max(b),
        3 => a.min(b),
        _ => a.wrapping_add(b),
    }
}

/// `all` becomes what `op` makes of it and `other`.
pub fn reduce(all: &mut [u8], other: &[u8], dtype: i32, op: i32) {
    match dtype {
        INT32 => {
            each(all, other, |a, b| integer(i32::from_le_bytes(a), i32::from_le_bytes(b), op).to_le_bytes())
        }
        FLOAT32 => {
            each(all, other, |a, b| float(f32::from_le_bytes(a), f32::from_le_bytes(b), op).to_le_bytes())
        }
        _ => each(all, other, |a: [u8; 2], b| to_bfloat16(float(from_bfloat16(&a), from_bfloat16(&b), op))),
    }
}

/// Divide a sum by the number of ranks, where an average was asked for.
pub fn finish(all: &mut [u8], ranks: usize, dtype: i32, op: i32) {
    if op != AVG {
        return;
    }
    let same = all.to_vec();
    match dtype {
        INT32 => each(all, &same, |a, _| (i32::from_le_bytes(a) / ranks as i32).to_le_bytes()),
        FLOAT32 => each(all, &same, |a, _| (f32::from_le_bytes(a) / ranks as f32).to_le_bytes()),
        _ => each(all, &same, |a: [u8; 2], _| to_bfloat16(from_bfloat16(&a) / ranks as f32)),
    }
}

fn each<const N: usize>(all: &mut [u8], other: &[u8], combine: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (a, b) in all.chunks_exact_mut(N).zip(other.chunks_exact(N)) {
        let combined = combine(a.try_into().unwrap(), b.try_into().unwrap());
        a.copy_from_slice(&combined);
    }
}
