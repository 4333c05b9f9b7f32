//! Settings of a mesh in etcd: the options of the first start, kept in a file of the directory for
//! later starts and for verbs.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::ValueHint;
use clap::builder::{OsStringValueParser, TypedValueParser};
use seikan_coordinator::{ETCD_PREFIX, Etcd};
use seikan_proto::mesh::RelayAddress;
use serde::{Deserialize, Serialize};
use toml_edit::{DocumentMut, Item};

use crate::service;

/// File of the settings, in the directory.
const FILE: &str = "etcd.toml";

/// Options of etcd.
#[derive(Clone, Debug, clap::Args)]
pub struct EtcdArguments {
    /// URLs of an etcd cluster that holds the mesh, for several coordinators. Kept in the
    /// directory, with the options below: an option that is left out keeps its value, an empty
    /// value ('') removes it, and http:// URLs remove all certificates
    #[arg(long, value_name = "URL,URL,...", value_delimiter = ',')]
    etcd: Vec<String>,
    /// Prefix of the keys [default: /seikan/mesh]
    #[arg(long, value_name = "PREFIX", requires = "etcd")]
    etcd_prefix: Option<String>,
    /// PEM certificates that sign etcd's certificate [default: those that the system trusts]
    #[arg(long, value_name = "FILE", requires = "etcd", value_hint = ValueHint::FilePath, value_parser = optional_path())]
    etcd_ca: Option<PathBuf>,
    /// PEM client certificate
    #[arg(long, value_name = "FILE", requires_all = ["etcd", "etcd_key"], value_hint = ValueHint::FilePath, value_parser = optional_path())]
    etcd_cert: Option<PathBuf>,
    /// PEM private key of the client certificate
    #[arg(long, value_name = "FILE", requires = "etcd_cert", value_hint = ValueHint::FilePath, value_parser = optional_path())]
    etcd_key: Option<PathBuf>,
    /// User name
    #[arg(long, value_name = "NAME", requires_all = ["etcd", "etcd_password_file"])]
    etcd_user: Option<String>,
    /// File with the user's password
    #[arg(long, value_name = "FILE", requires = "etcd_user", value_hint = ValueHint::FilePath, value_parser = optional_path())]
    etcd_password_file: Option<PathBuf>,
    /// Address by which members reach this coordinator. Other coordinators send it to members,
    /// which use it when their coordinator fails. Kept in the directory
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<RelayAddress>,
}

/// Returns a parser of paths that may be empty; clap's own refuses these.
fn optional_path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// Content of [`FILE`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct SettingsFile {
    endpoints: Vec<String>,
    prefix: String,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    user: Option<String>,
    password_file: Option<PathBuf>,
    /// Number of the mesh, as text: TOML's integers end at 2^63.
    mesh: Option<String>,
    /// Address by which members reach the coordinator of this directory.
    advertise: Option<String>,
}

impl EtcdArguments {
    /// Returns the settings: options, else the stored values, unless an empty option removes them.
    /// `None` without etcd.
    pub fn settings(&self, stored: Option<&Etcd>) -> anyhow::Result<Option<Etcd>> {
        let advertise = self.advertise.as_ref();
        let advertise = advertise.or_else(|| stored?.advertise.as_ref()).cloned();
        if self.etcd.is_empty() {
            return match stored.cloned() {
                None if advertise.is_some() => bail!(
                    "cannot advertise an address: --advertise needs --etcd, for several coordinators"
                ),
                stored => Ok(stored.map(|stored| Etcd {
                    advertise,
                    ..stored
                })),
            };
        }
        // Later commands may run in another directory.
        let absolute = std::path::absolute::<&Path>;
        let empty = Path::new("");
        // Without TLS there are no certificates.
        let tls = !self.etcd.iter().all(|url| url.starts_with("http://"));
        let ca = match self.etcd_ca.as_deref() {
            Some(ca) if ca == empty => None,
            Some(ca) => Some(absolute(ca)?),
            None => stored.and_then(|stored| stored.ca.clone()).filter(|_| tls),
        };
        let identity = match self.etcd_cert.as_deref().zip(self.etcd_key.as_deref()) {
            Some(both) if both == (empty, empty) => None,
            Some((cert, key)) => Some((absolute(cert)?, absolute(key)?)),
            None => stored
                .and_then(|stored| stored.identity.clone())
                .filter(|_| tls),
        };
        let user = match self
            .etcd_user
            .as_deref()
            .zip(self.etcd_password_file.as_deref())
        {
            Some(both) if both == ("", empty) => None,
            Some((user, file)) => Some((user.to_owned(), absolute(file)?)),
            None => stored.and_then(|stored| stored.user.clone()),
        };
        let prefix = self.etcd_prefix.as_deref();
        let prefix = prefix.map(|prefix| prefix.trim_end_matches('/'));
        let before = stored.map_or(ETCD_PREFIX, |stored| &stored.prefix);
        let prefix = prefix.unwrap_or(before).to_owned();
        Ok(Some(Etcd {
            endpoints: self.etcd.clone(),
            ca,
            identity,
            user,
            // A different prefix contains a different mesh.
            mesh: stored.and_then(|stored| stored.mesh.filter(|_| stored.prefix == prefix)),
            advertise,
            prefix,
        }))
    }
}

/// Returns the settings of a directory for a verb, which advertises no address; `None` if the mesh
/// is in a file.
pub fn read_settings(directory: &Path) -> anyhow::Result<Option<Etcd>> {
    let settings = read_coordinator_settings(directory)?;
    Ok(settings.map(|etcd| Etcd {
        advertise: None,
        ..etcd
    }))
}

/// Returns the settings of a directory for its coordinator; `None` if the mesh is in a file.
pub fn read_coordinator_settings(directory: &Path) -> anyhow::Result<Option<Etcd>> {
    let file = directory.join(FILE);
    let Some(text) = read(&file)? else {
        return Ok(None);
    };
    let invalid = || format!("cannot use {}: correct it or remove it", file.display());
    let settings: SettingsFile = toml::from_str(&text).with_context(invalid)?;
    let advertise = settings.advertise.as_deref().map(str::parse).transpose();
    let mesh = settings.mesh.as_deref().map(str::parse).transpose();
    Ok(Some(Etcd {
        endpoints: settings.endpoints,
        prefix: settings.prefix,
        ca: settings.ca,
        identity: settings.cert.zip(settings.key),
        user: settings.user.zip(settings.password_file),
        mesh: mesh.with_context(invalid)?,
        advertise: advertise.with_context(invalid)?,
    }))
}

/// Returns the text of a file; `None` if it is missing.
fn read(file: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
    }
}

/// Writes the settings into a directory, readable by its owner only. Keeps comments and formatting
/// of the file.
pub fn write_settings(directory: &Path, etcd: &Etcd) -> anyhow::Result<()> {
    let (cert, key) = etcd.identity.clone().unzip();
    let (user, password_file) = etcd.user.clone().unzip();
    let settings = SettingsFile {
        endpoints: etcd.endpoints.clone(),
        prefix: etcd.prefix.clone(),
        ca: etcd.ca.clone(),
        cert,
        key,
        user,
        password_file,
        mesh: etcd.mesh.as_ref().map(ToString::to_string),
        advertise: etcd.advertise.as_ref().map(ToString::to_string),
    };
    let file = directory.join(FILE);
    let before = read(&file)?.unwrap_or_default();
    let text = edited(&before, &toml::to_string(&settings)?)
        .with_context(|| format!("cannot use {}: correct it or remove it", file.display()))?;
    let write = || {
        let temporary = file.with_extension("new");
        // Left by an interrupted write.
        let _ = fs::remove_file(&temporary);
        let mut new = service::create_private(&temporary)?;
        new.write_all(text.as_bytes())?;
        new.sync_all()?;
        fs::rename(&temporary, &file)
    };
    write().with_context(|| format!("cannot write {}", file.display()))
}

/// Returns `text` with exactly the keys and values of `wanted`. Comments, order, and the notation
/// of unchanged values stay.
fn edited(text: &str, wanted: &str) -> anyhow::Result<String> {
    let (before, after): (toml::Table, toml::Table) = (text.parse()?, wanted.parse()?);
    let mut document: DocumentMut = text.parse()?;
    document.retain(|key, _| after.contains_key(key));
    for (key, new) in wanted.parse::<DocumentMut>()?.iter() {
        if before.get(key) == after.get(key) {
            continue;
        }
        let mut new = new.clone();
        let old = document.entry(key).or_insert(Item::None);
        if let (Some(old), Some(new)) = (old.as_value(), new.as_value_mut()) {
            *new.decor_mut() = old.decor().clone();
        }
        *old = new;
    }
    Ok(document.to_string())
}

/// Fails if a directory with a mesh in etcd also has one in a file: which of them is meant is
/// unknown.
pub fn refuse_both(directory: &Path, database: &str) -> anyhow::Result<()> {
    if directory.join(database).exists() {
        bail!(
            "cannot use etcd in {}: it has a mesh in {database}; use another --dir, or `export` that mesh, rename {database} \
             and `import` the export",
            directory.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(words: &[&str], stored: Option<&Etcd>) -> Etcd {
        #[derive(clap::Parser)]
        struct Words {
            #[command(flatten)]
            etcd: EtcdArguments,
        }
        let words = [&["coordinator"], words].concat();
        let words: Words = clap::Parser::try_parse_from(words).expect("valid");
        words.etcd.settings(stored).expect("paths").expect("said")
    }

    #[test]
    fn options_that_are_left_out_keep_their_stored_value() {
        let first = settings(&["--etcd", "https://a:1"], None);
        assert_eq!(first.prefix, ETCD_PREFIX);
        let directory = tempfile::tempdir().expect("a directory");
        let first = Etcd {
            prefix: "/our/mesh".to_owned(),
            ca: Some("/ca.pem".into()),
            identity: Some(("/cert.pem".into(), "/key.pem".into())),
            user: Some(("me".to_owned(), "/password".into())),
            mesh: Some(u64::MAX),
            advertise: Some("one.example:7443".parse().expect("an address")),
            ..first
        };
        write_settings(directory.path(), &first).expect("stored");
        let stored = read_coordinator_settings(directory.path()).expect("read");
        assert_eq!(stored.as_ref(), Some(&first));
        let later = settings(&["--etcd", "https://b:1,https://c:1"], stored.as_ref());
        let endpoints = ["https://b:1", "https://c:1"].map(str::to_owned).to_vec();
        assert_eq!(later, Etcd { endpoints, ..first });
        let other = ["--etcd", "https://a:1", "--etcd-prefix", "/other/"];
        let other = settings(&other, stored.as_ref());
        assert_eq!((&*other.prefix, other.mesh), ("/other", None));
    }

    #[test]
    fn empty_options_remove_stored_values_and_http_removes_certificates() {
        let all = Etcd {
            ca: Some("/ca.pem".into()),
            identity: Some(("/cert.pem".into(), "/key.pem".into())),
            user: Some(("me".to_owned(), "/password".into())),
            ..settings(&["--etcd", "https://a:1"], None)
        };
        let later =
            |words: &[&str]| settings(&[&["--etcd", "https://a:1"], words].concat(), Some(&all));
        let ca = None;
        assert_eq!(later(&["--etcd-ca", ""]), Etcd { ca, ..all.clone() });
        let identity = None;
        let words = ["--etcd-cert", "", "--etcd-key", ""];
        assert_eq!(
            later(&words),
            Etcd {
                identity,
                ..all.clone()
            }
        );
        let user = None;
        let words = ["--etcd-user", "", "--etcd-password-file", ""];
        assert_eq!(
            later(&words),
            Etcd {
                user,
                ..all.clone()
            }
        );
        let plain = settings(&["--etcd", "http://a:1,http://b:1"], Some(&all));
        assert_eq!(
            (plain.ca, plain.identity, plain.user),
            (None, None, all.user.clone())
        );
        // Certificates stay if any URL needs them.
        let mixed = settings(&["--etcd", "http://a:1,https://b:1"], Some(&all));
        assert_eq!(
            (mixed.ca, mixed.identity),
            (all.ca.clone(), all.identity.clone())
        );
    }

    #[test]
    fn comments_and_formatting_of_the_file_stay() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join(FILE);
        let written = "# Ours, see the runbook.\nprefix = '/mesh'   # not /seikan\n\n\
                       # Both racks.\nendpoints = [\n    \"https://a:1\", # north\n    \"https://b:1\",\n]\n\
                       ca = '/old.pem'  # until May\n# Of the old one.\nuser = 'me'\npassword-file = '/password'\n# The end.\n";
        fs::write(&file, written).expect("written");
        let stored = read_coordinator_settings(directory.path())
            .expect("read")
            .expect("stored");
        let etcd = Etcd {
            ca: Some("/new.pem".into()),
            user: None,
            mesh: Some(7),
            ..stored
        };
        write_settings(directory.path(), &etcd).expect("stored");
        let text = fs::read_to_string(&file).expect("read");
        let (kept, _) = written.split_once("ca =").expect("a line");
        let lines = "ca = \"/new.pem\"  # until May\nmesh = \"7\"\n# The end.\n";
        assert_eq!(text, format!("{kept}{lines}"));
        assert_eq!(
            read_coordinator_settings(directory.path()).expect("read"),
            Some(etcd)
        );
    }
}
