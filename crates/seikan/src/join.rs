//! Joining a mesh.

use crate::config::Config;
use crate::error::Error;
use seikan_config::{CoordinatorUrl, PrivateKey};
use seikan_mesh::client::{Client, wait_for};
use seikan_mesh::join::{Member, register};
use seikan_mesh::web_proxy::WebProxies;
use seikan_node::system::SystemRandom;
use seikan_proto::mesh::{Credential, JoinRequest};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// A request to join a mesh.
///
/// `seikan coordinator token` prints URL, pin and token. The file keeps the key of the new member
/// and its credential at the coordinator. Hence the token is needed only the first time, and
/// `seikan up FILE --userspace` can start the member as well.
#[derive(Clone)]
pub struct Join {
    url: String,
    token: Zeroizing<String>,
    name: String,
    file: PathBuf,
    pin: Option<String>,
    port: Option<u16>,
    uses_proxy: bool,
}

impl Join {
    /// Creates a request to the coordinator at `https://HOST:PORT` to become the member `name`,
    /// with a join token. The configuration of the member is written to `file` (`.toml`), which
    /// only its owner can read.
    pub fn new(url: &str, token: &str, name: &str, file: impl Into<PathBuf>) -> Join {
        Join {
            url: url.to_owned(),
            token: Zeroizing::new(token.to_owned()),
            name: name.to_owned(),
            file: file.into(),
            pin: None,
            port: None,
            uses_proxy: false,
        }
    }

    /// Sets the pin of the coordinator's certificate [default: a certificate that the system trusts].
    pub fn pin(mut self, pin: &str) -> Join {
        self.pin = Some(pin.to_owned());
        self
    }

    /// Sets the UDP port to listen on [default: chosen by the kernel].
    pub fn listen_port(mut self, port: u16) -> Join {
        self.port = Some(port);
        self
    }

    /// Uses the web proxy given by `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`.
    pub fn web_proxy_from_env(mut self) -> Join {
        self.uses_proxy = true;
        self
    }

    /// Registers this host unless its file already holds a member, and returns the configuration.
    /// Blocks.
    pub(crate) fn run(&self) -> Result<Config, Error> {
        if !self.is_registered()? {
            self.register()?;
        }
        let config = Config::from_file(&self.file)?;
        if self.uses_proxy {
            return config.web_proxy_from_env();
        }
        Ok(config)
    }

    fn is_registered(&self) -> Result<bool, Error> {
        match fs::metadata(&self.file) {
            // An empty file has no member.
            Ok(metadata) => Ok(!metadata.is_file() || metadata.len() > 0),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(source) => Err(of_file(&self.file, source)),
        }
    }

    fn register(&self) -> Result<(), Error> {
        let url: CoordinatorUrl = self.url.parse().map_err(failed)?;
        let pin = match &self.pin {
            Some(pin) => Some(pin.parse().map_err(failed)?),
            None => None,
        };
        let web_proxies = if self.uses_proxy {
            WebProxies::from_env().map_err(failed)?
        } else {
            WebProxies::default()
        };
        let key = PrivateKey::generate(&mut SystemRandom);
        let request = JoinRequest {
            token: self.token.parse().map_err(failed)?,
            name: self.name.parse().map_err(failed)?,
            public_key: key.public(),
            credential: Credential::generate(&mut SystemRandom),
        };
        let client = Client::new(&url, pin, None, web_proxies).map_err(failed)?;
        // Create the file before the token is used up, because it may not be writable.
        let file = NewFile::create(&self.file)?;
        if self.is_registered()? {
            // Another call with this file has registered meanwhile; the lock waited for it.
            return Ok(());
        }
        let joined = wait_for(register(&client, &request)).map_err(failed)?;
        let member = Member {
            key: &key,
            coordinator: &url,
            pin,
            credential: &request.credential,
            joined: &joined,
            port: self.port,
        };
        file.complete(&member.to_toml())
    }
}

impl std::fmt::Debug for Join {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Join");
        shown.field("url", &self.url).field("name", &self.name);
        shown.field("file", &self.file).finish_non_exhaustive()
    }
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Join(Box::new(error))
}

fn of_file(path: &Path, source: std::io::Error) -> Error {
    Error::File {
        path: path.to_owned(),
        source,
    }
}

/// A file that is written as `FILE.new` and renamed when it is complete. It is removed if dropped
/// before.
struct NewFile<'a> {
    path: &'a Path,
    new_path: PathBuf,
    file: File,
}

impl NewFile<'_> {
    /// Creates or empties `FILE.new`, which only its owner can read, and locks it. Waits while
    /// another call holds the lock: a second member in the same file would overwrite the key of the
    /// first.
    fn create(path: &Path) -> Result<NewFile<'_>, Error> {
        let mut new_path = path.as_os_str().to_owned();
        new_path.push(".new");
        let new_path = PathBuf::from(new_path);
        let file = locked(&new_path).map_err(|source| of_file(&new_path, source))?;
        Ok(NewFile {
            path,
            new_path,
            file,
        })
    }

    /// Writes the text to disk, and renames the file.
    fn complete(mut self, text: &str) -> Result<(), Error> {
        let written = self
            .file
            .write_all(text.as_bytes())
            .and_then(|()| self.file.sync_all())
            .and_then(|()| fs::rename(&self.new_path, self.path));
        written.map_err(|source| of_file(self.path, source))
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        // After `complete`, `FILE.new` does not exist or belongs to a call that has waited for the
        // lock.
        if names(&self.new_path, &self.file).unwrap_or(false) {
            let _ = fs::remove_file(&self.new_path);
        }
    }
}

/// Opens an empty file that stays locked as long as it is open.
fn locked(path: &Path) -> std::io::Result<File> {
    loop {
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false).mode(0o600);
        let file = options
            .custom_flags(nix::fcntl::OFlag::O_NOFOLLOW.bits())
            .open(path)?;
        file.lock()?;
        // The former holder of the lock may have renamed or removed it.
        if names(path, &file)? {
            file.set_permissions(Permissions::from_mode(0o600))?;
            file.set_len(0)?;
            return Ok(file);
        }
    }
}

/// Whether the path names this open file.
fn names(path: &Path, file: &File) -> std::io::Result<bool> {
    let open = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (open.dev(), open.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    /// A join that fails as its coordinator cannot be reached: port 9 of this host is closed.
    fn join(file: &Path) -> Join {
        let token = format!("skt_{}", "A".repeat(32));
        Join::new("https://127.0.0.1:9", &token, "svc", file)
    }

    #[test]
    fn a_file_appears_when_it_is_complete_and_only_its_user_can_read_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("svc.toml");
        let new_path = folder.path().join("svc.toml.new");
        // Of an interrupted attempt.
        fs::write(&new_path, "a part").expect("written");
        let file = NewFile::create(&path).expect("created");
        assert!(!path.exists() && new_path.exists());
        file.complete("whole").expect("written");
        assert_eq!(fs::read_to_string(&path).expect("read"), "whole");
        assert!(!new_path.exists());
        let mode = fs::metadata(&path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn two_joins_with_one_file_wait_for_each_other() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("svc.toml");
        let first = NewFile::create(&path).expect("created");
        thread::scope(|scope| {
            let second = scope.spawn(|| join(&path).run());
            thread::sleep(Duration::from_millis(200));
            assert!(!second.is_finished(), "it waits");
            // No configuration, but that of the first.
            first.complete("whole").expect("written");
            let joined = second.join().expect("no panic");
            assert!(matches!(joined, Err(Error::Config(_))), "{joined:?}");
        });
        assert_eq!(fs::read_to_string(&path).expect("read"), "whole");
        assert_eq!(fs::read_dir(&folder).expect("read").count(), 1);
    }

    #[test]
    fn a_failed_join_leaves_no_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let joined = join(&folder.path().join("svc.toml")).run();
        assert!(matches!(joined, Err(Error::Join(_))), "{joined:?}");
        assert_eq!(fs::read_dir(&folder).expect("read").count(), 0);
    }

    #[test]
    fn an_empty_file_does_not_keep_a_host_from_joining() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("svc.toml");
        fs::write(&path, "").expect("written");
        let joined = join(&path).run();
        assert!(matches!(joined, Err(Error::Join(_))), "{joined:?}");
    }
}
