//! The parts of a report, and the archive made of them.

use std::fmt::Write as _;
use std::fs::File;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use flate2::Compression;
use flate2::write::GzEncoder;
use seikan_ui::time::utc_now;
use serde::Serialize;

use super::redact::{Redactor, Secrets};
use crate::screen::printable;

/// Parts of a report, and the reasons why others are missing.
#[derive(Default)]
pub struct Report {
    /// Secrets that no part may contain.
    pub secrets: Secrets,
    parts: Vec<Part>,
    missing: Vec<(String, String)>,
}

struct Part {
    name: String,
    /// Its content in a few words, for README.txt.
    about: &'static str,
    content: Content,
}

/// Content of a part.
pub enum Content {
    /// Text of values that have types, none of which is a secret or a command.
    Text(String),
    /// Free text, such as a log, which may quote commands.
    Log(String),
    /// Binary data. `text` has every text in it: binary data that contains a secret is left out.
    Binary {
        /// The bytes of the file.
        bytes: Vec<u8>,
        /// The texts in them.
        text: String,
    },
}

/// Contents of a written archive.
pub struct Contents {
    /// Number of parts.
    pub parts: usize,
    /// Missing parts with the reason.
    pub missing: Vec<(String, String)>,
}

impl Content {
    /// Returns a value as JSON, indented.
    pub fn json(value: &impl Serialize) -> anyhow::Result<Content> {
        Ok(Content::Text(serde_json::to_string_pretty(value)? + "\n"))
    }
}

impl Report {
    /// Adds a part, or the reason why it is missing.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        about: &'static str,
        content: anyhow::Result<Content>,
    ) {
        let name = name.into();
        match content {
            Ok(content) => self.parts.push(Part {
                name,
                about,
                content,
            }),
            Err(error) => self.miss(name, &error),
        }
    }

    /// Notes the reason why parts are missing.
    pub fn miss(&mut self, names: impl Into<String>, error: &anyhow::Error) {
        let reason = printable(&format!("{error:#}"));
        self.missing.push((names.into(), reason));
    }

    /// Writes the archive: all parts without secrets, in a directory called `title`, README.txt first.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(mut self, title: &str, out: &File) -> anyhow::Result<Contents> {
        let redactor = self.secrets.redactor()?;
        let mut files = Vec::new();
        for part in std::mem::take(&mut self.parts) {
            match redacted(part.content, &redactor) {
                Ok(bytes) => files.push((part.name, part.about, bytes)),
                Err(error) => self.miss(part.name, &error),
            }
        }
        for (_, reason) in &mut self.missing {
            *reason = redactor.log(reason);
        }
        let listed = files.iter().map(|(name, about, _)| (name.as_str(), *about));
        let readme = readme(&listed.collect::<Vec<_>>(), &self.missing);

        let mut archive = tar::Builder::new(GzEncoder::new(out, Compression::default()));
        let mut append = |name: &str, bytes: &[u8]| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o600);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(now.unwrap_or_default().as_secs());
            archive.append_data(&mut header, format!("{title}/{name}"), bytes)
        };
        append("README.txt", readme.as_bytes())?;
        for (name, _, bytes) in &files {
            append(name, bytes)?;
        }
        archive.into_inner()?.finish()?;
        Ok(Contents {
            parts: files.len(),
            missing: self.missing,
        })
    }
}

fn redacted(content: Content, redactor: &Redactor) -> anyhow::Result<Vec<u8>> {
    match content {
        Content::Text(text) => Ok(redactor.text(&text).into_bytes()),
        Content::Log(text) => Ok(redactor.log(&text).into_bytes()),
        Content::Binary { bytes, text } => {
            let raw = String::from_utf8_lossy(&bytes);
            if redactor.text(&text) != text || redactor.text(&raw) != raw {
                return Err(anyhow!("it contains a secret, so it was left out"));
            }
            Ok(bytes)
        }
    }
}

fn readme(parts: &[(&str, &str)], missing: &[(String, String)]) -> String {
    let mut text = format!(
        "Bug report of Seikan {}, {} UTC\n\n\
         Read it before you send it. Left out: private keys, preshared keys, credentials, tokens and the commands of\n\
         hooks. In the log, words of these commands are left out too. Not left out: addresses, also public ones; public\n\
         keys; names of this host, of peers, members, interfaces and programs; connections of this host through the\n\
         tunnel. The report contains no payload of packets.\n\nParts:\n",
        env!("CARGO_PKG_VERSION"),
        utc_now()
    );
    let width = parts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    // Writing to a String cannot fail.
    for (name, about) in parts {
        let _ = writeln!(text, "  {name:width$}  {about}");
    }
    if !missing.is_empty() {
        text.push_str("\nMissing parts:\n");
    }
    for (name, reason) in missing {
        let _ = writeln!(text, "  {name}: {reason}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    const KEY: &str = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";

    fn written(report: Report) -> (Contents, Vec<(String, String)>) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let contents = report.write("report", file.as_file()).expect("written");
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(
            File::open(file.path()).expect("a file"),
        ));
        let entries = archive.entries().expect("entries").map(|entry| {
            let mut entry = entry.expect("an entry");
            let name = entry.path().expect("a path").display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).expect("text");
            (name, text)
        });
        (contents, entries.collect())
    }

    #[test]
    fn readme_lists_parts_and_missing_ones_without_secrets() {
        let mut report = Report::default();
        report.secrets.learn(KEY, "wg0");
        report.add("a.txt", "a text", Ok(Content::Text(format!("key {KEY}\n"))));
        report.add("b.txt", "a log", Err(anyhow!("cannot use\n{KEY}")));
        let (contents, files) = written(report);
        assert_eq!((contents.parts, contents.missing.len()), (1, 1));
        let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["report/README.txt", "report/a.txt"]);
        assert!(files[0].1.contains("  a.txt  a text\n"), "{}", files[0].1);
        assert!(
            files[0]
                .1
                .contains("  b.txt: cannot use\u{fffd}(redacted)\n")
        );
        assert_eq!(files[1].1, "key (redacted)\n");
    }

    #[test]
    fn binary_data_with_a_secret_is_left_out() {
        let mut report = Report::default();
        report.secrets.learn(KEY, "wg0");
        let binary = |bytes: &str, text: &str| {
            Ok(Content::Binary {
                bytes: bytes.into(),
                text: text.into(),
            })
        };
        report.add("a", "clean", binary("\u{1}", "eth0"));
        report.add("b", "bytes", binary(KEY, "eth0"));
        report.add("c", "compressed", binary("\u{1}", KEY));
        let (contents, files) = written(report);
        let missing: Vec<_> = contents.missing.iter().map(|(name, _)| name).collect();
        assert_eq!(missing, ["b", "c"]);
        assert_eq!(files.last().expect("a file").0, "report/a");
    }
}
