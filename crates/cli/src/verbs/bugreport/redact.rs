//! Removes secrets from texts, after all other measures: parts are made of values without secrets,
//! and the log is meant to have none.
//!
//! Keys and credentials are found in base64 (both alphabets, also percent-encoded) and in
//! hexadecimal digits. Two characters at either end are not compared, because reading a private key
//! changes bits there (RFC 7748, section 5); they are removed together with the rest. Commands of
//! hooks, and long words in them, are found in logs: a hook that fails is quoted there, and its own
//! output may follow.

use aho_corasick::{AhoCorasick, MatchKind};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use seikan_config::parse_preshared_key;
use zeroize::Zeroizing;

/// Replaces a secret.
const MASK: &str = "(redacted)";
/// Length in bytes from which on a word of a command may be a secret. Logs have shorter words in
/// common with commands.
const LONG_WORD: usize = 8;
/// First characters of a mesh's secrets: the credential of a member, the secret of a relay, a join token.
const MESH_SECRETS: [&str; 3] = ["skc_", "skr_", "skt_"];

/// Secrets of all configurations.
#[derive(Default)]
pub struct Secrets {
    /// Keys and credentials, without their ends, in every form.
    keys: Vec<Zeroizing<String>>,
    /// Commands and their words.
    commands: Vec<Zeroizing<String>>,
}

/// Finds secrets in texts.
pub struct Redactor {
    keys: AhoCorasick,
    commands: AhoCorasick,
    /// Finds [`MESH_SECRETS`] in one pass: a compromised daemon may report any text.
    mesh: AhoCorasick,
}

impl Secrets {
    /// Adds a key, a credential, or the command of a hook of this interface.
    pub fn learn(&mut self, text: &str, interface: &str) {
        let text = text.trim();
        if let Ok(key) = parse_preshared_key(text) {
            return self.learn_bytes(key.as_bytes());
        }
        let mut prefixes = MESH_SECRETS.iter();
        if let Some(base64) = prefixes.find_map(|prefix| text.strip_prefix(prefix))
            && let Ok(bytes) = URL_SAFE_NO_PAD.decode(base64)
        {
            return self.learn_bytes(&bytes);
        }
        self.learn_command(&text.replace("%i", interface));
    }

    fn learn_bytes(&mut self, bytes: &[u8]) {
        let base64 = Zeroizing::new(STANDARD_NO_PAD.encode(bytes));
        // A shorter key or credential is no secret, and would match other text.
        let [_, middle @ .., _] = bytes else { return };
        if middle.len() < 14 {
            return;
        }
        let base64 = &base64[2..base64.len() - 2];
        let hex: String = middle.iter().map(|byte| format!("{byte:02x}")).collect();
        let forms = [
            base64.to_owned(),
            base64.replace('+', "-").replace('/', "_"),
            base64.replace('+', "%2b").replace('/', "%2f"),
            hex,
        ];
        self.keys.extend(forms.map(Zeroizing::new));
    }

    fn learn_command(&mut self, command: &str) {
        let ends = |c: char| c.is_whitespace() || "\"'`=;&|()<>,\\$?#:@".contains(c);
        let words = command.split(ends).map(str::to_owned);
        // Formats of logs escape quotes.
        let escaped = serde_json::to_string(command).unwrap_or_default();
        let escaped = escaped.trim_matches('"').to_owned();
        let texts = words.chain([command.to_owned(), escaped]);
        let long = texts.filter(|text| text.len() >= LONG_WORD);
        self.commands.extend(long.map(Zeroizing::new));
    }

    /// Returns the redactor of all secrets.
    ///
    /// # Errors
    /// There are too many secrets.
    pub fn redactor(&self) -> anyhow::Result<Redactor> {
        let find = |texts: &[Zeroizing<String>], insensitive| {
            AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .ascii_case_insensitive(insensitive)
                .build(texts.iter().map(|text| text.as_str()))
        };
        Ok(Redactor {
            // Hexadecimal digits may be of either case.
            keys: find(&self.keys, true)?,
            commands: find(&self.commands, false)?,
            mesh: AhoCorasick::new(MESH_SECRETS)?,
        })
    }
}

impl Redactor {
    /// Returns a text without keys, credentials, tokens, and passwords of URLs.
    pub fn text(&self, text: &str) -> String {
        let is_digit = |c: char| c.is_ascii_alphanumeric() || "+/-_%".contains(c);
        let mut out = String::with_capacity(text.len());
        let mut end = 0;
        for found in self.keys.find_iter(text) {
            // Within a run that was replaced.
            if found.start() < end {
                continue;
            }
            out.push_str(text[end..found.start()].trim_end_matches(is_digit));
            out.push_str(MASK);
            let rest = text[found.end()..].trim_start_matches(is_digit);
            end = text.len() - rest.trim_start_matches('=').len();
        }
        out.push_str(&text[end..]);
        without_passwords(&self.without_mesh_secrets(&out))
    }

    /// Returns a log also without commands and their words.
    pub fn log(&self, text: &str) -> String {
        let without = vec![MASK; self.commands.patterns_len()];
        self.text(&self.commands.replace_all(text, &without))
    }

    /// Replaces every secret of a mesh, known or not.
    fn without_mesh_secrets(&self, text: &str) -> String {
        let is_base64 = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let mut out = String::with_capacity(text.len());
        let mut end = 0;
        for found in self.mesh.find_iter(text) {
            // Within a run that was replaced.
            if found.start() < end {
                continue;
            }
            out.push_str(&text[end..found.start()]);
            out.push_str(MASK);
            let rest = text[found.end()..].trim_start_matches(is_base64);
            end = text.len() - rest.len();
        }
        out + &text[end..]
    }
}

/// Replaces user and password of every URL.
fn without_passwords(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        out.push_str(before);
        out.push_str("://");
        let ends = |c: char| c.is_whitespace() || "/\"'<>`".contains(c);
        let authority = &after[..after.find(ends).unwrap_or(after.len())];
        rest = match authority.rfind('@') {
            Some(end) => {
                out.push_str(MASK);
                &after[end..]
            }
            None => after,
        };
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE};

    fn redactor(secrets: &[&str]) -> Redactor {
        let mut all = Secrets::default();
        for secret in secrets {
            all.learn(secret, "wg0");
        }
        all.redactor().expect("few secrets")
    }

    #[test]
    fn a_key_is_found_in_every_form() {
        // The key has bytes that need both characters in which the two alphabets differ.
        let mut key = [0xfb; 32];
        key[..3].copy_from_slice(&[7, 0xef, 0xff]);
        let redactor = redactor(&[&STANDARD.encode(key)]);
        let mut clamped = key;
        clamped[0] &= 0b1111_1000;
        clamped[31] = (clamped[31] & 0b0111_1111) | 0b0100_0000;
        for key in [key, clamped] {
            let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
            let base64 = STANDARD.encode(key);
            let percent = base64.replace('+', "%2B").replace('/', "%2F");
            for form in [
                base64.clone(),
                STANDARD_NO_PAD.encode(key),
                URL_SAFE.encode(key),
                URL_SAFE_NO_PAD.encode(key),
                percent.replace('=', "%3D"),
                percent.to_lowercase(),
                hex.to_uppercase(),
                hex,
            ] {
                let text = redactor.text(&format!("é key=\"{form}\", {form}."));
                assert_eq!(text, "é key=\"(redacted)\", (redacted).", "{form}");
            }
        }
    }

    #[test]
    fn mesh_secrets_and_passwords_of_urls_are_found_without_being_known() {
        let redactor = redactor(&[]);
        for (text, expected) in [
            ("token skt_AAEC-_wQF.", "token (redacted)."),
            ("skc_skr_AA skt_,skr_B", "(redacted) (redacted),(redacted)"),
            (
                "at postgres://a:b@db.example.org/x and https://example.org/a@b",
                "at postgres://(redacted)@db.example.org/x and https://example.org/a@b",
            ),
        ] {
            assert_eq!(redactor.text(text), expected);
        }
    }

    #[test]
    fn every_secret_of_a_long_text_is_replaced() {
        // The search takes very long if it starts anew after each of these characters.
        let count = 1 << 20;
        let text = redactor(&[]).text(&"skr_A ".repeat(count));
        assert!(text == "(redacted) ".repeat(count));
    }

    #[test]
    fn a_credential_is_found_without_its_prefix() {
        let redactor = redactor(&["skc_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX"]);
        let text = redactor.text("AAECAwQFBgcICQoLDA0ODxAREhMUFRYX");
        assert_eq!(text, MASK);
        let text = redactor.text("0x000102030405060708090A0B0C0D0E0F1011121314151617");
        assert_eq!(text, MASK);
    }

    #[test]
    fn a_log_quotes_no_command() {
        let redactor = redactor(&["notify --token=horse-battery \"%i up\"; true"]);
        for (text, expected) in [
            (
                "hook `notify --token=horse-battery \"wg0 up\"; true` failed",
                "hook `(redacted)` failed",
            ),
            (
                r#"{"message":"notify --token=horse-battery \"wg0 up\"; true"}"#,
                r#"{"message":"(redacted)"}"#,
            ),
            ("bad token horse-battery", "bad token (redacted)"),
            ("wg0 is up: true", "wg0 is up: true"),
        ] {
            assert_eq!(redactor.log(text), expected);
        }
        assert_eq!(redactor.text("{\"up\":true}"), "{\"up\":true}");
    }
}
