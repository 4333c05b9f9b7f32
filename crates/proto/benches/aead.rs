//! The cost of a record, by size and cipher, and whether sealing in place is faster than sealing to
//! another buffer.
//!
//! `cargo bench -p seikan-proto --bench aead`. Prints GB/s, the median of several runs. The
//! variants are interleaved, so that a drift of the machine's speed affects all of them.

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use aws_lc_rs::aead::{
    AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Plaintext of one super-packet.
const SUPER_PACKET: usize = 60_000;
/// Plaintext of one record on a path of 1,500 bytes.
const RECORD: usize = 1437;
const TAG: usize = 16;
const ROUNDS: usize = 15;

fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Copies each piece after its header and seals it there, as the tunnel does.
fn copy_and_seal(key: &LessSafeKey, text: &[u8], out: &mut [u8], piece: usize) {
    for (i, (chunk, room)) in text
        .chunks(piece)
        .zip(out.chunks_mut(piece + TAG))
        .enumerate()
    {
        let (sealed, tag) = room.split_at_mut(chunk.len());
        sealed.copy_from_slice(chunk);
        let made = key.seal_in_place_separate_tag(nonce(i as u64), Aad::empty(), sealed);
        tag[..TAG].copy_from_slice(made.expect("short").as_ref());
    }
}

/// Seals from the source buffer to the destination buffer.
fn seal_to_output(key: &LessSafeKey, text: &[u8], out: &mut [u8], piece: usize) {
    for (i, (chunk, room)) in text
        .chunks(piece)
        .zip(out.chunks_mut(piece + TAG))
        .enumerate()
    {
        let (sealed, tag) = room.split_at_mut(chunk.len());
        let n = nonce(i as u64);
        key.seal_out_of_place_scatter(n, Aad::empty(), chunk, sealed, &[], &mut tag[..TAG])
            .expect("short");
    }
}

type Operation = fn(&LessSafeKey, &[u8], &mut [u8], usize);

fn gigabytes_per_second(
    operation: Operation,
    key: &LessSafeKey,
    text: &[u8],
    out: &mut [u8],
    piece: usize,
) -> f64 {
    let start = Instant::now();
    let mut bytes = 0;
    while start.elapsed() < Duration::from_millis(20) {
        operation(key, black_box(text), out, piece);
        black_box(&mut *out);
        bytes += text.len();
    }
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn main() {
    let text: Vec<u8> = (0..SUPER_PACKET).map(|i| i as u8).collect();
    let mut out = vec![0; 2 * SUPER_PACKET];
    let key =
        |a: &'static Algorithm| LessSafeKey::new(UnboundKey::new(a, &[7; 32]).expect("32 bytes"));
    let ciphers = [
        ("AES-256-GCM", key(&AES_256_GCM)),
        ("ChaCha20-Poly1305", key(&CHACHA20_POLY1305)),
    ];
    let operations: [(&str, Operation); 2] = [
        ("copy, seal in place", copy_and_seal),
        ("seal elsewhere", seal_to_output),
    ];
    let sizes = [
        ("record a datagram", RECORD),
        ("record a super-packet", SUPER_PACKET),
    ];
    println!("{:18} {:22} {:20} {:>6}", "cipher", "record", "way", "GB/s");
    let mut cases = Vec::new();
    for cipher in &ciphers {
        for size in sizes {
            cases.extend(operations.map(|operation| (cipher, size, operation)));
        }
    }
    let mut figures = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (figure, (cipher, size, operation)) in figures.iter_mut().zip(&cases) {
            figure.push(gigabytes_per_second(
                operation.1,
                &cipher.1,
                &text,
                &mut out,
                size.1,
            ));
        }
    }
    for (mut figure, (cipher, size, operation)) in figures.into_iter().zip(cases) {
        figure.sort_by(f64::total_cmp);
        println!(
            "{:18} {:22} {:20} {:6.2}",
            cipher.0,
            size.0,
            operation.0,
            figure[ROUNDS / 2]
        );
    }
}
