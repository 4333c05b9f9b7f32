//! Joining a mesh.

use crate::config::Config;
use crate::error::Error;
use seikan_config::{CoordinatorUrl, PrivateKey};
use seikan_mesh::client::{Client, wait_for};
use seikan_mesh::join::{Member, register};
use seikan_mesh::web_proxy::WebProxies;
use seikan_node::system::SystemRandom;
use seikan_proto::mesh::{Credential, JoinRequest};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// A request to join a mesh.
///
/// `seikan coordinator token` prints URL, pin and token. The file keeps the key of the new member and its credential at the
/// coordinator: the token is needed for the first time only, and `seikan up FILE --userspace` can start the member as well.
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
    /// A request to the coordinator at `https://HOST:PORT`, with a token, to become the member `name`. Its configuration is
    /// written to `file` (`.toml`), which only its user can read.
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

    /// Uses the web proxy that `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` name.
    pub fn web_proxy_from_env(mut self) -> Join {
        self.uses_proxy = true;
        self
    }

    /// Registers this host, unless its file exists, and returns the configuration. Blocks.
    pub(crate) fn run(&self) -> Result<Config, Error> {
        if !self.file.exists() {
            self.register()?;
        }
        let config = Config::from_file(&self.file)?;
        if self.uses_proxy {
            return config.web_proxy_from_env();
        }
        Ok(config)
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
        // Before the token is used up: the file may not be writable.
        let mut written = create(&self.file)?;
        let joined = wait_for(register(&client, &request)).map_err(failed);
        let outcome = joined.and_then(|joined| {
            let member = Member {
                key: &key,
                coordinator: &url,
                pin,
                credential: &request.credential,
                joined: &joined,
                port: self.port,
            };
            let written = written
                .write_all(member.to_toml().as_bytes())
                .and_then(|()| written.sync_all());
            written.map_err(|source| of_file(&self.file, source))
        });
        if outcome.is_err() {
            let _ = fs::remove_file(&self.file);
        }
        outcome
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

fn create(path: &Path) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create_new(true).mode(0o600);
    options.open(path).map_err(|source| of_file(path, source))
}
