//! The program has no time left, and most of its time is encryption and authentication.

use super::prelude::*;
use super::scheduling::{largest, limit_of_work};
use crate::Stage;

/// Share of the time in the cipher: a fast tunnel spends three tenths; from half on, the cipher is
/// the main cost.
const CRYPTO: Ramp = Ramp::new(0.3, 0.5);

/// Parts of the names of functions that use the processor's AES instructions: in OpenSSL, BoringSSL and AWS-LC, in Linux,
/// and in Go. In lower case.
const AES_INSTRUCTIONS: [&str; 12] = [
    "aesni",
    "vaes",
    "aes_hw",
    "aesv8",
    "aes_v8",
    "aes_gcm_encrypt_avx",
    "aes_gcm_decrypt_avx",
    "aes_gcm_enc_",
    "aes_gcm_dec_",
    "aes_ce",
    "ce_aes",
    "gcmaes",
];

pub(super) const SPEC: Spec = Spec::fault(
    Cause::CipherBound,
    PathStep::Program,
    "The processor spends its time on encryption.",
    evaluate,
)
.effects(effects::WORK)
.counted(
    Source::Threads,
    &[metric::THREAD_USER_NS],
    Per::Second,
    0.6e9,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let (limited, busy) = limit_of_work(evidence)?;
    let crypto = evidence
        .work(Stage::Crypto)
        .ok_or("processor time by function was not sampled: needs root or CAP_PERFMON")?;
    let leading = evidence.leading_function(&[Stage::Crypto]);
    let mut facts = vec![
        Fact::new(
            match leading {
                Some(symbol) => format!("share of its time in the cipher, mostly {symbol}"),
                None => "share of its time in the cipher".to_owned(),
            },
            crypto,
            "below 0.3",
            "processor profile",
        ),
        busy,
    ];
    let next = [
        Stage::Syscall,
        Stage::Network,
        Stage::Copy,
        Stage::Checksum,
        Stage::Schedule,
    ];
    facts = facts.and(
        "share of its time in the next largest stage",
        largest(evidence, &next),
        "larger, if the cipher were not the limit",
        "processor profile",
    );
    let has = |feature: &str| {
        evidence
            .map
            .host
            .cpu_features
            .iter()
            .any(|name| name == feature)
    };
    let aes = has("aes");
    facts = facts.and(
        "AES instructions of the processor (1: present)",
        f64::from(aes),
        "1",
        "/proc/cpuinfo",
    );
    let uses_aes = leading.is_some_and(|symbol| {
        AES_INSTRUCTIONS
            .iter()
            .any(|part| symbol.to_ascii_lowercase().contains(part))
    });
    let weight = 0.95 * CRYPTO.at(crypto) * limited;
    let mut remedies = vec![Remedy::ask(
        Location::Tunnel,
        "encrypt in several threads, or in larger records: a larger inner MTU, super-packets",
        Vec::new(),
        "a factor of up to the number of processors",
    )];
    if !uses_aes {
        remedies.insert(0, faster_cipher(aes));
    }
    weighted(weight, facts, remedies)
}

/// The cipher that is fastest on this processor. `aes`: whether the processor has AES instructions.
fn faster_cipher(aes: bool) -> Remedy {
    let change = if aes {
        "use AES-128-GCM or AES-256-GCM with a library that uses the processor's AES instructions, at both ends"
    } else {
        "use ChaCha20-Poly1305 with a library that uses vector instructions, at both ends; this processor has no AES instructions"
    };
    Remedy::ask(
        Location::Tunnel,
        change,
        vec![
            "openssl speed -evp aes-128-gcm".to_owned(),
            "openssl speed -evp chacha20-poly1305".to_owned(),
        ],
        "the ratio of the two speeds, for that share of the time",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    fn working(running: f64, crypto: f64) -> Evidence {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, running, 0.02);
        let shares = [(Stage::Crypto, crypto), (Stage::Network, 0.9 - crypto)];
        profile(&mut evidence, &shares);
        evidence
    }

    #[test]
    fn a_full_program_that_encrypts_is_it() {
        let finding = present(evaluate(&working(0.97, 0.7)));
        assert!(finding.weight > 0.9);
        assert!(finding.facts[0].name.contains("mostly crypto"));
    }

    #[test]
    fn a_cipher_that_uses_aes_instructions_is_not_to_be_exchanged() {
        let remedies = |symbol: &str| {
            let mut evidence = working(0.97, 0.7);
            let program = &mut evidence.profile.as_mut().expect("profile").program;
            let crypto = program
                .iter_mut()
                .find(|share| share.stage == Stage::Crypto);
            crypto.expect("a share").symbol = symbol.into();
            present(evaluate(&evidence)).remedies.len()
        };
        for symbol in ["ChaCha20_ctr32_avx2", "vpaes_encrypt", "bsaes_cbc_encrypt"] {
            assert_eq!(remedies(symbol), 2, "{symbol}");
        }
        for symbol in [
            "_aesni_ctr32_ghash_6x",
            "aws_lc_0_47_0_aes_gcm_encrypt_avx512",
            "aws_lc_0_47_0_aes_gcm_dec_kernel",
            "aesv8_gcm_8x_enc_256",
            "aes_gcm_enc_update_vaes_avx10_512",
            "crypto/aes.gcmAesEnc",
        ] {
            assert_eq!(remedies(symbol), 1, "{symbol}");
        }
    }

    #[test]
    fn one_that_does_something_else_is_not() {
        assert!(absent(evaluate(&working(0.97, 0.25))));
    }

    #[test]
    fn one_that_has_time_is_not() {
        assert!(absent(evaluate(&working(0.4, 0.8))));
    }

    #[test]
    fn without_a_profile_nothing_is_said_of_a_full_one() {
        let mut evidence = working(0.97, 0.7);
        evidence.profile = None;
        assert!(unseen(evaluate(&evidence)));
    }

    #[test]
    fn a_tunnel_of_the_kernel_uses_the_profile_of_the_machine() {
        let mut evidence = working(0.0, 0.0);
        evidence.map.program = None;
        processor(&mut evidence, 0, 0.98, 0.9);
        processor(&mut evidence, 1, 0.2, 0.0);
        let profile = evidence.profile.as_mut().expect("profile");
        profile.machine = vec![crate::Share {
            symbol: "chacha20_4block_xor_avx512vl".into(),
            stage: Stage::Crypto,
            share: 0.6,
        }];
        assert!(present(evaluate(&evidence)).weight > 0.9);
    }
}
