//! Loads a configuration by a path or an interface's name.
//!
//! [`locate`] -> read -> [`Source`] -> [`parse`] -> [`Parsed`]. Only [`load`] accesses the file
//! system; tests and fuzzers can pass any text to [`parse`].

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::diagnostic::{Diagnostic, Diagnostics, Severity};
use super::overrides::Overrides;
use super::report::Reporter;
use super::schema::Form;
use super::source::{ReadKey, Source, Syntax};
use super::types::{Config, InterfaceName, InterfaceNameError};
use super::{check, ini, read, toml};

/// Maximum size of a configuration, in bytes; enough for some fifty thousand peers.
const MAX_FILE: u64 = 16 << 20;
/// Maximum size of a key file, in bytes.
const MAX_KEY_FILE: u64 = 4096;
/// File with the environment of the unit seikan@.service: a member's web proxy, with its password.
const ENVIRONMENT: &str = "/etc/seikan/environment";
/// Mode bits of a file that give access to others than its owner.
const OTHERS: u32 = 0o077;

/// Result of parsing a file.
#[derive(Debug, Default)]
pub struct Parsed {
    /// The configuration, if there was no error.
    pub config: Option<Config>,
    /// All diagnostics, in the order of the lines.
    pub diagnostics: Diagnostics,
    /// The file that was read, if one was found.
    pub path: Option<PathBuf>,
    /// Texts that no report may contain: keys, credentials and commands of the file, also if it has
    /// errors, and the contents of key files.
    pub unreportable: Vec<Zeroizing<String>>,
    /// The text contains a private or preshared key.
    holds_secret: bool,
}

/// A configuration that cannot be used; displays all diagnostics.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub Diagnostics);

/// Finds, reads and checks the configuration of `target`: a path, or an interface's name. For a
/// member of a mesh, it checks the rights of `/etc/seikan/environment` as well.
pub fn load(target: &str, overrides: &Overrides) -> Parsed {
    load_with(target, overrides, Path::new(ENVIRONMENT))
}

fn load_with(target: &str, overrides: &Overrides, environment: &Path) -> Parsed {
    let found = locate(target).and_then(|path| Ok((read_file(&path)?, path)));
    let ((source, is_open), path) = match found {
        Ok(found) => found,
        Err(diagnostics) => {
            return Parsed {
                diagnostics,
                ..Parsed::default()
            };
        }
    };
    let open_keys = RefCell::new(Vec::new());
    let mut parsed = parse(&source, overrides, &|key: &Path| {
        let key = path.parent().unwrap_or(Path::new("")).join(key);
        let mut file = open_key(&key)?;
        if is_open_to_others(&file)? {
            open_keys.borrow_mut().push(key);
        }
        read_text(&mut file, MAX_KEY_FILE)
    });
    if parsed.holds_secret && is_open {
        open_keys.borrow_mut().insert(0, path.clone());
    }
    let is_member = parsed.config.as_ref().is_some_and(|c| c.mesh.is_some());
    if is_member && exposes_password(environment).unwrap_or(false) {
        open_keys.borrow_mut().push(environment.to_owned());
    }
    let mut about_files = Diagnostics::default();
    for path in open_keys.into_inner() {
        let path = path.display().to_string();
        let help = format!("chmod 600 {path}");
        let message = "contains a secret, and other users than its owner can read or change it";
        about_files.push(Diagnostic::new(Severity::Warning, path, message).with_help(help));
    }
    about_files.append(parsed.diagnostics);
    parsed.diagnostics = about_files;
    parsed.path = Some(path);
    parsed
}

/// Returns whether others than its owner can access a file that has the URL of a web proxy with a password.
fn exposes_password(environment: &Path) -> io::Result<bool> {
    let mut file = File::open(environment)?;
    Ok(is_open_to_others(&file)? && read_text(&mut file, MAX_FILE)?.contains('@'))
}

/// Returns whether others than its owner can access a file.
fn is_open_to_others(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.permissions().mode() & OTHERS != 0)
}

/// Parses and checks a text, without access to the file system.
pub fn parse(source: &Source, overrides: &Overrides, read_key: &ReadKey<'_>) -> Parsed {
    let text = source.text.strip_prefix('\u{feff}').unwrap_or(&source.text);
    let mut reporter = Reporter::new(&source.file, source.syntax, text);
    let sections = match source.syntax {
        Syntax::Ini => Some(ini::split(text, &mut reporter)),
        Syntax::Toml => toml::split(text, &mut reporter),
    };
    let entries = || {
        sections
            .iter()
            .flatten()
            .flat_map(|section| &section.entries)
    };
    let holds_secret = entries().any(|entry| entry.key.form == Form::Secret);
    let hidden = entries().filter(|entry| !entry.key.is_reportable());
    let texts = hidden.flat_map(|entry| entry.items.iter().map(|item| item.text.clone()));
    let unreportable = RefCell::new(texts.collect::<Vec<_>>());
    let config = sections.and_then(|sections| {
        let read_key = |path: &Path| {
            let text = read_key(path)?;
            unreportable.borrow_mut().push(text.clone());
            Ok(text)
        };
        let draft = read::read(sections, &read_key, &mut reporter);
        let name = interface_name_of(Path::new(&source.file));
        check::check(&draft, name, overrides, &mut reporter)
    });
    let diagnostics = reporter.finish();
    Parsed {
        config: config.filter(|_| !diagnostics.has_errors()),
        diagnostics,
        path: None,
        unreportable: unreportable.into_inner(),
        holds_secret,
    }
}

/// Returns the file of `target`: `target` itself if it is a path (it contains a `/`, or ends in
/// `.conf` or `.toml`). Otherwise it is an interface's name, and the result is the first existing
/// one of `/etc/seikan/NAME.toml`, `/etc/seikan/NAME.conf` and `/etc/wireguard/NAME.conf`.
pub fn locate(target: &str) -> Result<PathBuf, Diagnostics> {
    locate_in(target, Path::new("/etc"))
}

fn locate_in(target: &str, etc: &Path) -> Result<PathBuf, Diagnostics> {
    if is_path(target) {
        return Ok(PathBuf::from(target));
    }
    let not_found = |help: String| {
        let message = format!("there is no configuration for `{target}`");
        Diagnostics::from(Diagnostic::new(Severity::Error, target, message).with_help(help))
    };
    if let Err(error) = target.parse::<InterfaceName>() {
        return Err(not_found(format!(
            "give a path, or an interface's name: {error}"
        )));
    }
    let candidates = [
        etc.join(format!("seikan/{target}.toml")),
        etc.join(format!("seikan/{target}.conf")),
        etc.join(format!("wireguard/{target}.conf")),
    ];
    // A file that cannot be examined is still meant: reading it reports the reason.
    let there = |path: &&PathBuf| path.try_exists().unwrap_or(true);
    if let Some(path) = candidates.iter().find(there) {
        return Ok(path.clone());
    }
    let looked: Vec<_> = candidates.iter().map(|p| p.display().to_string()).collect();
    let mut help = format!("looked for {}", looked.join(", "));
    if Path::new(target).exists() {
        help.push_str(&format!("; write ./{target} for the file in this folder"));
    }
    Err(not_found(help))
}

fn is_path(target: &str) -> bool {
    target.contains('/') || target.ends_with(".conf") || target.ends_with(".toml")
}

/// Returns the interface of `target`, a path or an interface's name; the file need not exist.
pub fn interface_name(target: &str) -> Result<InterfaceName, InterfaceNameError> {
    if is_path(target) {
        interface_name_of(Path::new(target))
    } else {
        target.parse()
    }
}

/// Returns the interface of a file: its name without `.conf` or `.toml`.
fn interface_name_of(path: &Path) -> Result<InterfaceName, InterfaceNameError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = [".conf", ".toml"]
        .iter()
        .find_map(|ending| name.strip_suffix(ending));
    stem.unwrap_or(&name).parse()
}

/// Reads a file; returns its text, and whether others than its owner can access it.
fn read_file(path: &Path) -> Result<(Source, bool), Diagnostics> {
    let name = path.display().to_string();
    let failed = |error: io::Error| {
        let help = match error.kind() {
            io::ErrorKind::NotFound => {
                "check the path; an interface's name is looked up in /etc/seikan and /etc/wireguard"
            }
            io::ErrorKind::PermissionDenied => "run as the file's owner, usually root",
            io::ErrorKind::IsADirectory => "give the path of a file",
            _ => "give the path of a text file",
        };
        let message = format!("cannot read the file: {error}");
        Diagnostics::from(Diagnostic::new(Severity::Error, &name, message).with_help(help))
    };
    let mut file = File::open(path).map_err(failed)?;
    let is_open = is_open_to_others(&file).map_err(failed)?;
    let source = Source {
        syntax: Syntax::of(path),
        text: read_text(&mut file, MAX_FILE).map_err(failed)?,
        file: name.clone(),
    };
    Ok((source, is_open))
}

/// Opens a key file. It does not wait for the writer of a FIFO, and takes over no terminal.
fn open_key(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true);
    let file = options
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(file)
}

/// Reads UTF-8 of at most `max` bytes.
fn read_text(file: &mut File, max: u64) -> io::Result<Zeroizing<String>> {
    let mut bytes = Zeroizing::new(Vec::new());
    file.take(max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        let message = format!("it has more than {max} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    match std::str::from_utf8(&bytes) {
        Ok(text) => Ok(Zeroizing::new(text.to_owned())),
        Err(error) => {
            let before = &bytes[..error.valid_up_to()];
            let line = before.iter().filter(|b| **b == b'\n').count() + 1;
            let message = format!("line {line} is not UTF-8 text");
            Err(io::Error::new(io::ErrorKind::InvalidData, message))
        }
    }
}

impl Parsed {
    /// Returns the configuration with its warnings, or all diagnostics if it cannot be used.
    pub fn into_result(self) -> Result<(Config, Diagnostics), ConfigError> {
        match self.config {
            Some(config) => Ok((config, self.diagnostics)),
            None => Err(ConfigError(self.diagnostics)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::encode_key;
    use super::*;

    fn etc_with(files: &[&str]) -> tempfile::TempDir {
        let etc = tempfile::tempdir().unwrap();
        for folder in ["seikan", "wireguard"] {
            std::fs::create_dir(etc.path().join(folder)).unwrap();
        }
        for file in files {
            std::fs::write(etc.path().join(file), "").unwrap();
        }
        etc
    }

    #[test]
    fn a_name_is_looked_up_toml_first_and_wireguard_last() {
        let all = ["seikan/wg0.toml", "seikan/wg0.conf", "wireguard/wg0.conf"];
        for from in 0..all.len() {
            let etc = etc_with(&all[from..]);
            let found = locate_in("wg0", etc.path()).unwrap();
            assert_eq!(found, etc.path().join(all[from]));
        }
    }

    #[test]
    fn paths_are_recognized() {
        let etc = etc_with(&["seikan/wg0.conf"]);
        for path in ["wg0.conf", "./wg0", "/tmp/wg0", "wg0.toml"] {
            assert_eq!(locate_in(path, etc.path()).unwrap(), PathBuf::from(path));
        }
    }

    #[test]
    fn a_name_that_is_nowhere_says_where_it_was_looked_for() {
        let etc = etc_with(&[]);
        let help = locate_in("wg0", etc.path()).unwrap_err().to_string();
        assert!(help.contains("seikan/wg0.toml"), "{help}");
        assert!(help.contains("wireguard/wg0.conf"), "{help}");
    }

    #[test]
    fn the_interface_is_named_by_the_file() {
        assert_eq!(
            interface_name("/etc/wireguard/wg0.conf").unwrap().as_str(),
            "wg0"
        );
        assert_eq!(interface_name("office.toml").unwrap().as_str(), "office");
        assert_eq!(interface_name("wg0").unwrap().as_str(), "wg0");
        assert!(interface_name("a name.conf").is_err());
        assert!(interface_name("sixteen-letters-.conf").is_err());
    }

    #[test]
    fn a_secret_that_others_can_read_is_warned_of() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wg0.conf");
        let key = encode_key(&[0x40; 32]);
        let text = format!(
            "[Interface]\nPrivateKey = {}\nAddress = 10.0.0.1/24\nListenPort = 1\n",
            *key
        );
        std::fs::write(&path, text).unwrap();
        for (mode, warned) in [(0o600, false), (0o640, true), (0o604, true)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let parsed = load(path.to_str().unwrap(), &Overrides::default());
            assert!(parsed.config.is_some());
            let found = parsed
                .diagnostics
                .iter()
                .any(|d| d.message.contains("secret"));
            assert_eq!(found, warned, "{mode:o}");
        }
    }

    #[test]
    fn a_password_of_a_web_proxy_that_others_can_read_is_warned_of() {
        let folder = tempfile::tempdir().unwrap();
        let environment = folder.path().join("environment");
        let key = encode_key(&[0x40; 32]);
        let own = format!("private-key = \"{}\"\naddress = \"10.0.0.1/24\"\n", *key);
        let credential = format!("skc_{}", "A".repeat(32));
        let mesh = format!("coordinator = \"https://hub\"\ncredential = \"{credential}\"\n");
        let (member, alone) = (folder.path().join("m.toml"), folder.path().join("a.toml"));
        for (path, text) in [(&member, own.clone() + &mesh), (&alone, own)] {
            std::fs::write(path, text).unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
        }
        let (secret, open) = ("HTTPS_PROXY=http://u:p@h:1\n", "HTTPS_PROXY=http://h:1\n");
        for (config, text, mode, warned) in [
            (&member, secret, 0o644, true),
            (&member, secret, 0o640, true),
            (&member, secret, 0o600, false),
            (&member, open, 0o644, false),
            (&alone, secret, 0o644, false),
        ] {
            std::fs::write(&environment, text).unwrap();
            std::fs::set_permissions(&environment, PermissionsExt::from_mode(mode)).unwrap();
            let parsed = load_with(
                config.to_str().unwrap(),
                &Overrides::default(),
                &environment,
            );
            assert!(parsed.config.is_some(), "{}", parsed.diagnostics);
            let shown = parsed.diagnostics.to_string();
            let help = format!("chmod 600 {}", environment.display());
            assert_eq!(shown.contains(&help), warned, "{config:?} {text} {mode:o}");
            assert!(!shown.contains("u:p"), "{shown}");
        }
        std::fs::remove_file(&environment).unwrap();
        let parsed = load_with(
            member.to_str().unwrap(),
            &Overrides::default(),
            &environment,
        );
        assert!(parsed.diagnostics.is_empty(), "{}", parsed.diagnostics);
    }

    #[test]
    fn a_private_key_may_be_in_another_file() {
        let folder = tempfile::tempdir().unwrap();
        let key = encode_key(&[0x40; 32]);
        std::fs::write(folder.path().join("wg0.key"), format!("{}\n", *key)).unwrap();
        let path = folder.path().join("wg0.toml");
        std::fs::write(&path, "private-key-file = \"wg0.key\"\n").unwrap();
        let parsed = load(path.to_str().unwrap(), &Overrides::default());
        assert_eq!(parsed.config.unwrap().private_key.as_bytes(), &[0x40; 32]);
    }

    #[test]
    fn a_key_is_read_from_a_regular_file_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wg0.toml");
        let fifo = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(made.unwrap().success());
        for key in ["/dev/zero", "/", fifo.to_str().unwrap()] {
            std::fs::write(&path, format!("private-key-file = \"{key}\"\n")).unwrap();
            let parsed = load(path.to_str().unwrap(), &Overrides::default());
            let text = parsed.diagnostics.to_string();
            assert!(text.contains("not a regular file"), "{key}: {text}");
        }
    }

    #[test]
    fn a_file_that_is_no_text_names_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wg0.conf");
        std::fs::write(&path, b"[Interface]\n\xff\n").unwrap();
        let parsed = load(path.to_str().unwrap(), &Overrides::default());
        let message = &parsed.diagnostics.iter().next().unwrap().message;
        assert!(message.contains("line 2"), "{message}");
    }
}
