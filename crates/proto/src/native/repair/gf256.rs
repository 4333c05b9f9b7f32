//! Arithmetic in GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11D), and the factors of
//! the erasure code.
//!
//! Sixteen bytes are processed at a time, without branches on their values. Short functions are always
//! inlined and loops written out, because a program that is linked for size gets neither from the compiler.

use wide::u8x16;

/// The low byte of the polynomial.
const POLYNOMIAL: u8 = 0x1d;
/// Bytes in a vector.
const LANES: usize = 16;

/// Returns `value` times x.
const fn double(value: u8) -> u8 {
    let carry = ((value as i8) >> 7) as u8;
    (value << 1) ^ (carry & POLYNOMIAL)
}

/// Returns each byte times x.
#[inline(always)]
fn double_all(values: u8x16) -> u8x16 {
    let carries = values.max(u8x16::splat(0x80)).simd_eq(values);
    (values + values) ^ (carries & u8x16::splat(POLYNOMIAL))
}

/// Returns each byte times x^0 to x^7.
#[inline(always)]
fn powers(values: u8x16) -> [u8x16; 8] {
    let x1 = double_all(values);
    let x2 = double_all(x1);
    let x3 = double_all(x2);
    let x4 = double_all(x3);
    let x5 = double_all(x4);
    let x6 = double_all(x5);
    [values, x1, x2, x3, x4, x5, x6, double_all(x6)]
}

/// Returns each byte times `factor`, from its [`powers`].
#[inline(always)]
fn times(powers: &[u8x16; 8], factor: u8) -> u8x16 {
    let mut product = u8x16::splat(0);
    let mut bits = factor;
    while bits != 0 {
        product ^= powers[bits.trailing_zeros() as usize];
        bits &= bits - 1;
    }
    product
}

/// Returns the product of two elements.
const fn mul(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b != 0 {
        if b & 1 != 0 {
            product ^= a;
        }
        a = double(a);
        b >>= 1;
    }
    product
}

/// The inverse of every element; 0 for 0.
const INVERSE: [u8; 256] = {
    let mut inverse = [0; 256];
    // Powers of the generator x: the inverse of x^k is x^(255 - k).
    let mut powers = [0u8; 256];
    let (mut k, mut power) = (0, 1);
    while k < 255 {
        powers[k] = power;
        power = double(power);
        k += 1;
    }
    powers[255] = 1;
    k = 0;
    while k < 255 {
        inverse[powers[k] as usize] = powers[255 - k];
        k += 1;
    }
    inverse
};

/// Returns the factor of the symbol at `index` in parity `number`: y / (index + y) with y = 128 +
/// number.
///
/// Each row of this matrix is a row of a Cauchy matrix times its y. Hence every square submatrix is
/// invertible, and any n parities restore any n symbols. All factors of the first symbol are 1.
///
/// # Panics
/// If `number` or `index` is above 127.
pub fn factor(number: u8, index: u8) -> u8 {
    assert!(number < 128 && index < 128, "outside the code");
    let y = 128 + number;
    mul(y, INVERSE[usize::from(index ^ y)])
}

/// Adds `bytes` times `factors[k]` to row `k`, from position `at` on.
pub fn add_multiples<'a>(
    rows: impl Iterator<Item = &'a mut [u8]>,
    factors: &[u8],
    at: usize,
    bytes: &[u8],
) {
    let (chunks, rest) = bytes.as_chunks::<LANES>();
    let mut padded = [0; LANES];
    padded[..rest.len()].copy_from_slice(rest);
    let last = powers(u8x16::new(padded));
    let mut rows: Vec<_> = rows
        .zip(factors)
        .map(|(row, factor)| {
            let (row, rest) = row[at..at + bytes.len()].as_chunks_mut::<LANES>();
            let product = times(&last, *factor).to_array();
            rest.iter_mut()
                .zip(product)
                .for_each(|(sum, byte)| *sum ^= byte);
            (row, *factor)
        })
        .collect();
    for (n, chunk) in chunks.iter().enumerate() {
        let powers = powers(u8x16::new(*chunk));
        for (row, factor) in &mut rows {
            row[n] = (u8x16::new(row[n]) ^ times(&powers, *factor)).to_array();
        }
    }
}

/// Solves for the missing symbols. Before the call, `rows[k]` is the sum of `factor(numbers[k], i)`
/// times symbol `i`, for all `i` in `missing`. Afterwards `rows[k]` is the symbol `missing[k]`.
/// There are as many rows as missing symbols, all of the same length.
pub fn solve(rows: &mut [Vec<u8>], numbers: &[u8], missing: &[u8]) {
    let n = missing.len();
    debug_assert!(rows.len() == n && numbers.len() == n);
    let mut matrix: Vec<Vec<u8>> = numbers
        .iter()
        .map(|number| {
            missing
                .iter()
                .map(|index| factor(*number, *index))
                .collect()
        })
        .collect();
    // Gauss-Jordan elimination. No pivot is zero, because every leading submatrix is invertible.
    for pivot in 0..n {
        let inverse = INVERSE[usize::from(matrix[pivot][pivot])];
        for value in &mut matrix[pivot] {
            *value = mul(*value, inverse);
        }
        scale(&mut rows[pivot], inverse);
        let factors: Vec<u8> = (0..n)
            .map(|row| if row == pivot { 0 } else { matrix[row][pivot] })
            .collect();
        let line = matrix[pivot].clone();
        for (row, factor) in matrix.iter_mut().zip(&factors) {
            for (value, pivot) in row.iter_mut().zip(&line) {
                *value ^= mul(*factor, *pivot);
            }
        }
        let bytes = std::mem::take(&mut rows[pivot]);
        let others = rows.iter_mut().enumerate().filter(|(k, _)| *k != pivot);
        let factors: Vec<u8> = (0..n).filter(|k| *k != pivot).map(|k| factors[k]).collect();
        add_multiples(others.map(|(_, row)| &mut row[..]), &factors, 0, &bytes);
        rows[pivot] = bytes;
    }
}

/// Multiplies a row by a factor.
fn scale(row: &mut [u8], factor: u8) {
    if factor != 1 {
        let copy = row.to_vec();
        row.fill(0);
        add_multiples(std::iter::once(row), &[factor], 0, &copy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_is_that_of_the_polynomial() {
        // x^7 times x is x^8, which is x^4 + x^3 + x^2 + 1.
        assert_eq!(mul(0x80, 2), 0x1d);
        for a in 1..=255u8 {
            assert_eq!(mul(a, INVERSE[usize::from(a)]), 1, "{a}");
        }
        // The field has no divisors of zero, and multiplication distributes.
        for (a, b, c) in [(3, 200, 77), (255, 254, 1), (128, 129, 130)] {
            assert_eq!(mul(a, b ^ c), mul(a, b) ^ mul(a, c));
            assert_ne!(mul(a, b), 0);
        }
    }

    #[test]
    fn multiples_of_any_length_are_those_of_single_bytes() {
        for length in [0, 1, 7, 255, 256, 257, 1400] {
            let bytes: Vec<u8> = (0..length).map(|i| (i * 31) as u8).collect();
            let mut rows = vec![vec![5u8; length + 3]; 3];
            let factors = [0, 1, 0xa7];
            add_multiples(rows.iter_mut().map(|row| &mut row[..]), &factors, 2, &bytes);
            for (row, factor) in rows.iter().zip(factors) {
                let expected: Vec<u8> = bytes.iter().map(|b| 5 ^ mul(*b, factor)).collect();
                assert_eq!(row[2..2 + length], expected, "{length}, {factor}");
                assert_eq!((row[0], row[1], row[length + 2]), (5, 5, 5));
            }
        }
    }

    #[test]
    fn any_parities_restore_as_many_symbols() {
        let symbol = |i: u8| -> Vec<u8> { (0..50u8).map(|b| b.wrapping_mul(i) ^ i).collect() };
        for (numbers, missing) in [
            (vec![0], vec![127]),
            (vec![3, 15], vec![0, 64]),
            (vec![15, 0, 7], vec![1, 2, 3]),
            (
                (0..16).collect::<Vec<u8>>(),
                (100..116).collect::<Vec<u8>>(),
            ),
        ] {
            let mut rows: Vec<Vec<u8>> = numbers
                .iter()
                .map(|number| {
                    let mut row = vec![0; 50];
                    for i in &missing {
                        let of = std::iter::once(&mut row[..]);
                        add_multiples(of, &[factor(*number, *i)], 0, &symbol(*i));
                    }
                    row
                })
                .collect();
            solve(&mut rows, &numbers, &missing);
            for (row, i) in rows.iter().zip(&missing) {
                assert_eq!(*row, symbol(*i), "{numbers:?} for {missing:?}");
            }
        }
    }
}
