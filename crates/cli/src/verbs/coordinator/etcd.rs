//! A mesh whose truth is in etcd: where that is, as it was said at the first start and noted in the folder for the other verbs.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::ValueHint;
use clap::builder::{OsStringValueParser, TypedValueParser};
use seikan_coordinator::{ETCD_PREFIX, Etcd, Hold, Store};
use serde::{Deserialize, Serialize};
use toml_edit::{DocumentMut, Item};

/// The file in the folder.
const FILE: &str = "etcd.toml";

/// Where etcd is, and how it is spoken to.
#[derive(Clone, Debug, clap::Args)]
pub struct EtcdArguments {
    /// Keep what the mesh is in this etcd cluster, which other coordinators may share: URLs of its members. Noted in the folder, and what is
    /// not said beside it stays as it was noted: an empty value ('') takes it back, and http:// alone all certificates
    #[arg(long, value_name = "URL,URL,...", value_delimiter = ',')]
    etcd: Vec<String>,
    /// What its keys begin with there [default: /seikan/mesh]
    #[arg(long, value_name = "PREFIX", requires = "etcd")]
    etcd_prefix: Option<String>,
    /// What signs its certificates, PEM [default: what the system trusts]
    #[arg(long, value_name = "FILE", requires = "etcd", value_hint = ValueHint::FilePath, value_parser = path_or_nothing())]
    etcd_ca: Option<PathBuf>,
    /// Certificate to show it, PEM
    #[arg(long, value_name = "FILE", requires_all = ["etcd", "etcd_key"], value_hint = ValueHint::FilePath, value_parser = path_or_nothing())]
    etcd_cert: Option<PathBuf>,
    /// The key of that, PEM
    #[arg(long, value_name = "FILE", requires = "etcd_cert", value_hint = ValueHint::FilePath, value_parser = path_or_nothing())]
    etcd_key: Option<PathBuf>,
    /// User there
    #[arg(long, value_name = "NAME", requires_all = ["etcd", "etcd_password_file"])]
    etcd_user: Option<String>,
    /// File with that user's password
    #[arg(long, value_name = "FILE", requires = "etcd_user", value_hint = ValueHint::FilePath, value_parser = path_or_nothing())]
    etcd_password_file: Option<PathBuf>,
}

/// A path that may be empty, which clap's own may not.
fn path_or_nothing() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// What is noted.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Noted {
    endpoints: Vec<String>,
    prefix: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    ca: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cert: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    password_file: Option<PathBuf>,
    /// The number of the mesh that was there, as text: TOML's numbers end at 2^63.
    #[serde(skip_serializing_if = "Option::is_none")]
    mesh: Option<String>,
    /// Where members reach the coordinator of this folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    advertise: Option<String>,
}

impl EtcdArguments {
    /// What is said, if anything is, and for the rest what was noted before, unless an empty value takes that back.
    pub fn settings(&self, noted: Option<&Etcd>) -> anyhow::Result<Option<Etcd>> {
        if self.etcd.is_empty() {
            return Ok(noted.cloned());
        }
        // Other verbs may be said elsewhere.
        let absolute = std::path::absolute::<&Path>;
        let nothing = Path::new("");
        // There are no certificates without TLS.
        let tls = !self.etcd.iter().all(|url| url.starts_with("http://"));
        let ca = match self.etcd_ca.as_deref() {
            Some(ca) if ca == nothing => None,
            Some(ca) => Some(absolute(ca)?),
            None => noted.and_then(|noted| noted.ca.clone()).filter(|_| tls),
        };
        let identity = match self.etcd_cert.as_deref().zip(self.etcd_key.as_deref()) {
            Some(both) if both == (nothing, nothing) => None,
            Some((cert, key)) => Some((absolute(cert)?, absolute(key)?)),
            None => noted
                .and_then(|noted| noted.identity.clone())
                .filter(|_| tls),
        };
        let user = match self
            .etcd_user
            .as_deref()
            .zip(self.etcd_password_file.as_deref())
        {
            Some(both) if both == ("", nothing) => None,
            Some((user, file)) => Some((user.to_owned(), absolute(file)?)),
            None => noted.and_then(|noted| noted.user.clone()),
        };
        let prefix = self.etcd_prefix.as_deref();
        let prefix = prefix.map(|prefix| prefix.trim_end_matches('/'));
        let before = noted.map_or(ETCD_PREFIX, |noted| &noted.prefix);
        let prefix = prefix.unwrap_or(before).to_owned();
        Ok(Some(Etcd {
            endpoints: self.etcd.clone(),
            ca,
            identity,
            user,
            // Under another prefix another mesh is meant.
            mesh: noted.and_then(|noted| noted.mesh.filter(|_| noted.prefix == prefix)),
            advertise: noted.and_then(|noted| noted.advertise.clone()),
            prefix,
        }))
    }
}

/// What is noted in a folder, for a verb, which nobody is to reach; `None`: its mesh is in a file.
pub fn noted(folder: &Path) -> anyhow::Result<Option<Etcd>> {
    let noted = noted_coordinator(folder)?;
    Ok(noted.map(|etcd| Etcd {
        advertise: None,
        ..etcd
    }))
}

/// The same for the coordinator of the folder.
pub fn noted_coordinator(folder: &Path) -> anyhow::Result<Option<Etcd>> {
    let file = folder.join(FILE);
    let Some(text) = read(&file)? else {
        return Ok(None);
    };
    let odd = || format!("{} says something odd", file.display());
    let noted: Noted = toml::from_str(&text).with_context(odd)?;
    let advertise = noted.advertise.as_deref().map(str::parse).transpose();
    let mesh = noted.mesh.as_deref().map(str::parse).transpose();
    Ok(Some(Etcd {
        endpoints: noted.endpoints,
        prefix: noted.prefix,
        ca: noted.ca,
        identity: noted.cert.zip(noted.key),
        user: noted.user.zip(noted.password_file),
        mesh: mesh.with_context(odd)?,
        advertise: advertise.with_context(odd)?,
    }))
}

/// `None`: there is none.
fn read(file: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
    }
}

/// Notes it in a folder, for its owner only. What somebody wrote there by hand around it stays.
pub fn note(folder: &Path, etcd: &Etcd) -> anyhow::Result<()> {
    let (cert, key) = etcd.identity.clone().unzip();
    let (user, password_file) = etcd.user.clone().unzip();
    let noted = Noted {
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
    let file = folder.join(FILE);
    let before = read(&file)?.unwrap_or_default();
    let text = edited(&before, &toml::to_string(&noted)?)
        .with_context(|| format!("{} says something odd", file.display()))?;
    let write = || {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder)?;
        let beside = file.with_extension("new");
        // Of one that was broken off.
        let _ = fs::remove_file(&beside);
        let mut new = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&beside)?;
        new.write_all(text.as_bytes())?;
        new.sync_all()?;
        fs::rename(&beside, &file)
    };
    write().with_context(|| format!("cannot write {}", file.display()))
}

/// The text with the values of another one, whose keys are all that it is to have: comments and order stay, and how unchanged values are
/// written.
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

/// Notes nothing any more, if it is this mesh that was noted.
pub fn forget(folder: &Path, mesh: u64) -> io::Result<()> {
    let noted = noted_coordinator(folder).map_err(io::Error::other)?;
    match noted.is_some_and(|noted| noted.mesh == Some(mesh)) {
        true => fs::remove_file(folder.join(FILE)),
        false => Ok(()),
    }
}

/// Holds the file of a folder that has no etcd noted, so that no import notes one until it is opened.
pub fn hold_file(folder: &Path, database: &str) -> anyhow::Result<Hold> {
    let held = Store::hold(&folder.join(database))?;
    // An import that ended a moment ago has put the file away: another one would be another mesh.
    if noted(folder)?.is_some() {
        bail!(
            "the mesh of {} has just been brought into etcd: do this again",
            folder.display()
        );
    }
    Ok(held)
}

/// A folder has its mesh in a file or in etcd, not both: the one that is meant would be anybody's guess.
pub fn refuse_both(folder: &Path, database: &str) -> anyhow::Result<()> {
    if folder.join(database).exists() {
        bail!(
            "{} has a mesh of its own in {database}: take another folder (--dir) for one in etcd, or bring it there with `seikan coordinator \
             import`; if {FILE} is here because an import was broken off, do that again",
            folder.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(words: &[&str], noted: Option<&Etcd>) -> Etcd {
        #[derive(clap::Parser)]
        struct Words {
            #[command(flatten)]
            etcd: EtcdArguments,
        }
        let words = [&["coordinator"], words].concat();
        let words: Words = clap::Parser::try_parse_from(words).expect("understood");
        words.etcd.settings(noted).expect("paths").expect("said")
    }

    #[test]
    fn a_mesh_is_forgotten_and_no_other() {
        let folder = tempfile::tempdir().expect("a folder");
        forget(folder.path(), 7).expect("nothing is noted");
        let etcd = Etcd {
            mesh: Some(7),
            ..said(&["--etcd", "https://a:1"], None)
        };
        note(folder.path(), &etcd).expect("noted");
        forget(folder.path(), 8).expect("another");
        let noted = || noted_coordinator(folder.path()).expect("read");
        assert_eq!(noted(), Some(etcd));
        forget(folder.path(), 7).expect("this");
        assert_eq!(noted(), None);
    }

    #[test]
    fn no_file_is_held_where_etcd_was_noted_meanwhile() {
        let folder = tempfile::tempdir().expect("a folder");
        drop(hold_file(folder.path(), "mesh.db").expect("held"));
        let etcd = said(&["--etcd", "https://a:1"], None);
        note(folder.path(), &etcd).expect("noted");
        let error = hold_file(folder.path(), "mesh.db").expect_err("it is in etcd");
        assert!(error.to_string().contains("into etcd"), "{error}");
        assert!(!folder.path().join("mesh.db").exists());
    }

    #[test]
    fn what_is_not_said_is_as_it_was_noted() {
        let first = said(&["--etcd", "https://a:1"], None);
        assert_eq!(first.prefix, ETCD_PREFIX);
        let folder = tempfile::tempdir().expect("a folder");
        let first = Etcd {
            prefix: "/our/mesh".to_owned(),
            ca: Some("/ca.pem".into()),
            identity: Some(("/cert.pem".into(), "/key.pem".into())),
            user: Some(("me".to_owned(), "/password".into())),
            mesh: Some(u64::MAX),
            advertise: Some("one.example:7443".parse().expect("an address")),
            ..first
        };
        note(folder.path(), &first).expect("noted");
        let noted = noted_coordinator(folder.path()).expect("read");
        assert_eq!(noted.as_ref(), Some(&first));
        let later = said(&["--etcd", "https://b:1,https://c:1"], noted.as_ref());
        let endpoints = ["https://b:1", "https://c:1"].map(str::to_owned).to_vec();
        assert_eq!(later, Etcd { endpoints, ..first });
        let other = ["--etcd", "https://a:1", "--etcd-prefix", "/other/"];
        let other = said(&other, noted.as_ref());
        assert_eq!((&*other.prefix, other.mesh), ("/other", None));
    }

    #[test]
    fn what_was_noted_is_taken_back_by_nothing_and_certificates_by_http() {
        let all = Etcd {
            ca: Some("/ca.pem".into()),
            identity: Some(("/cert.pem".into(), "/key.pem".into())),
            user: Some(("me".to_owned(), "/password".into())),
            ..said(&["--etcd", "https://a:1"], None)
        };
        let later =
            |words: &[&str]| said(&[&["--etcd", "https://a:1"], words].concat(), Some(&all));
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
        let plain = said(&["--etcd", "http://a:1,http://b:1"], Some(&all));
        assert_eq!(
            (plain.ca, plain.identity, plain.user),
            (None, None, all.user.clone())
        );
        // What is right for one of them is not dropped for another.
        let mixed = said(&["--etcd", "http://a:1,https://b:1"], Some(&all));
        assert_eq!(
            (mixed.ca, mixed.identity),
            (all.ca.clone(), all.identity.clone())
        );
    }

    #[test]
    fn what_an_operator_wrote_stays_when_something_is_noted() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join(FILE);
        let written = "# Ours, see the runbook.\nprefix = '/mesh'   # not /seikan\n\n\
                       # Both racks.\nendpoints = [\n    \"https://a:1\", # north\n    \"https://b:1\",\n]\n\
                       ca = '/old.pem'  # until May\n# Of the old one.\nuser = 'me'\npassword-file = '/password'\n# The end.\n";
        fs::write(&file, written).expect("written");
        let noted = noted_coordinator(folder.path())
            .expect("read")
            .expect("noted");
        let etcd = Etcd {
            ca: Some("/new.pem".into()),
            user: None,
            mesh: Some(7),
            ..noted
        };
        note(folder.path(), &etcd).expect("noted");
        let text = fs::read_to_string(&file).expect("read");
        let (kept, _) = written.split_once("ca =").expect("a line");
        let lines = "ca = \"/new.pem\"  # until May\nmesh = \"7\"\n# The end.\n";
        assert_eq!(text, format!("{kept}{lines}"));
        assert_eq!(noted_coordinator(folder.path()).expect("read"), Some(etcd));
    }
}
