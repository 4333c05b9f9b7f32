//! Encryption speed of the libraries on one idle processor: OpenSSL, by `openssl speed`, and the
//! library that Seikan is built with.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{
    AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};

use super::{Bench, Experiment, Figures, Row};
use crate::error::{Doing, Result, setup};

/// Bytes encrypted at once: a packet.
const BLOCK: usize = 1_400;
/// Length of each measurement of Seikan's code.
const TIME: Duration = Duration::from_millis(500);
/// Packets between two looks at the clock.
const RUN: u32 = 256;
/// A variable of the environment.
type Variable = (String, String);
/// A row: its name, arguments of `openssl speed`, and what is taken away from the library.
type Openssl = (
    &'static str,
    &'static [&'static str],
    Option<fn() -> Variable>,
);
const CBC: &[&str] = &["-evp", "aes-256-cbc"];
const BLOWFISH: &[&str] = &[
    "-provider",
    "legacy",
    "-provider",
    "default",
    "-evp",
    "bf-cbc",
];
const OPENSSL: [Openssl; 8] = [
    ("OpenSSL AES-128-CBC", &["-evp", "aes-128-cbc"], None),
    ("OpenSSL AES-256-CBC", CBC, None),
    ("OpenSSL AES-256-CBC, no AES-NI", CBC, Some(without_aes)),
    (
        "OpenSSL AES-256-CBC, slow library",
        CBC,
        Some(without_extensions),
    ),
    // With a nonce and a tag for each packet.
    (
        "OpenSSL AES-256-GCM",
        &["-aead", "-evp", "aes-256-gcm"],
        None,
    ),
    (
        "OpenSSL ChaCha20-Poly1305",
        &["-aead", "-evp", "chacha20-poly1305"],
        None,
    ),
    ("OpenSSL BF-CBC", BLOWFISH, None),
    (
        "OpenSSL BF-CBC, slow library",
        BLOWFISH,
        Some(without_extensions),
    ),
];

/// Takes the instructions for AES away from OpenSSL, and those for GCM (OPENSSL_ia32cap(3): no AES
/// instructions (bit 57), no carry-less multiplication (bit 33); second word: no vector forms of
/// them (bits 41 and 42)).
pub(super) fn without_aes() -> Variable {
    (
        "OPENSSL_ia32cap".to_owned(),
        "~0x200000200000000:~0x60000000000".to_owned(),
    )
}

/// Takes every extension of the instruction set away from OpenSSL (OPENSSL_ia32cap(3)): AES and the
/// SHA of the HMAC run as on a processor of 2003.
pub(super) fn without_extensions() -> Variable {
    ("OPENSSL_ia32cap".to_owned(), "0x0:0x0".to_owned())
}

/// Measures every cipher once a round.
pub(super) fn figures(bench: &Bench<'_>, found: &mut Experiment) -> Result<()> {
    let own: [(&str, &Algorithm); 2] = [
        ("Seikan AES-256-GCM", &AES_256_GCM),
        ("Seikan ChaCha20-Poly1305", &CHACHA20_POLY1305),
    ];
    let theirs = OPENSSL.iter().map(|(name, ..)| Row::new(*name, None));
    let ours = own.iter().map(|(name, _)| Row::new(*name, None).own(true));
    let mut rows: Vec<Row> = theirs.chain(ours).collect();
    for round in 1..=bench.options.rounds {
        for (index, row) in rows.iter_mut().enumerate() {
            bench.interrupt.check()?;
            let speed = match OPENSSL.get(index) {
                Some((_, words, without)) => openssl(words, *without),
                None => sealed(own[index - OPENSSL.len()].1),
            };
            let context = format!("{}, round {round}", row.name);
            row.rounds.push(found.unless_failed(&context, speed)?);
        }
    }
    let title = format!("ciphers alone, one processor, packets of {BLOCK} bytes");
    found.figures.push(Figures {
        base: OPENSSL[1].0.to_owned(),
        ..Figures::new(title, "Mbit/s", rows)
    });
    Ok(())
}

/// Returns the result of `openssl speed`, in Mbit/s.
fn openssl(words: &[&str], without: Option<fn() -> Variable>) -> Result<f64> {
    let mut command = Command::new("openssl");
    command
        .args(["speed", "-elapsed", "-seconds", "1"])
        .args(["-bytes", &BLOCK.to_string()])
        .args(words)
        .stdin(Stdio::null());
    if let Some(without) = without {
        command.envs([without()]);
    }
    let output = command
        .output()
        .doing("run `openssl speed` (Debian: apt install openssl)")?;
    let said = String::from_utf8_lossy(&output.stdout);
    speed_of(&said).ok_or_else(|| {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let last = complaint.lines().last().unwrap_or("nothing").to_owned();
        setup(format!("`openssl speed` gave no speed: {last}"))
    })
}

/// The last column of the last line, which is in thousands of bytes a second: `AES-256-CBC
/// 1234567.89k`.
fn speed_of(said: &str) -> Option<f64> {
    let last = said.lines().rfind(|line| !line.trim().is_empty())?;
    let column = last.split_whitespace().last()?.strip_suffix('k')?;
    Some(column.parse::<f64>().ok()? * 8e-3)
}

/// Returns the speed of our library's seal operation, in Mbit/s.
fn sealed(algorithm: &'static Algorithm) -> Result<f64> {
    let refuse = |_| setup("the library refuses to encrypt: this is a bug");
    let key = vec![7; algorithm.key_len()];
    let key = LessSafeKey::new(UnboundKey::new(algorithm, &key).map_err(refuse)?);
    let mut packet = vec![0_u8; BLOCK];
    let (begin, mut count) = (Instant::now(), 0_u32);
    while begin.elapsed() < TIME {
        for _ in 0..RUN {
            count = count.wrapping_add(1);
            let mut nonce = [0; 12];
            nonce[8..].copy_from_slice(&count.to_be_bytes());
            let nonce = Nonce::assume_unique_for_key(nonce);
            let _tag = key
                .seal_in_place_separate_tag(nonce, Aad::empty(), &mut packet)
                .map_err(refuse)?;
        }
    }
    let bits = f64::from(count) * BLOCK as f64 * 8.0;
    Ok(bits / 1e6 / begin.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_speed_is_the_last_word_in_thousands_of_bytes() {
        let said = "version: 3.0.19\nThe 'numbers' are in 1000s of bytes per second processed.\n\
                    type           1400 bytes\nAES-256-CBC    1000000.00k\n";
        assert_eq!(speed_of(said), Some(8_000.0));
        assert_eq!(speed_of("type 1400 bytes\n"), None);
        assert_eq!(speed_of(""), None);
    }

    /// The extensions that OpenSSL uses with this variable (OPENSSL_ia32cap(3)): `CPUINFO:
    /// OPENSSL_ia32cap=0x...:0x... env:...`.
    fn extensions((name, value): Variable) -> [u64; 2] {
        let mut command = std::process::Command::new("openssl");
        let output = command.args(["version", "-c"]).env(name, value).output();
        let said = String::from_utf8(output.expect("openssl").stdout).expect("UTF-8");
        let words = said.split_once('=').expect("CPUINFO").1.split_whitespace();
        let both = words.take(1).flat_map(|words| words.split(":0x"));
        let numbers = both.map(|word| {
            let word = word.trim_start_matches("0x");
            u64::from_str_radix(word, 16).expect("hexadecimal")
        });
        let numbers: Vec<u64> = numbers.collect();
        numbers.try_into().expect("two words")
    }

    #[test]
    fn instructions_for_aes_and_all_extensions_are_taken_away() {
        let [first, second] = extensions(without_aes());
        assert_eq!(first & (1 << 57 | 1 << 33), 0, "{first:x}");
        assert_eq!(second & (1 << 41 | 1 << 42), 0, "{second:x}");
        // Bit 10 of the first word is reserved, and always set.
        let [first, second] = extensions(without_extensions());
        assert_eq!([first & !(1 << 10), second], [0, 0]);
    }
}
