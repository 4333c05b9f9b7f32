//! Client side of the control socket, for the command line.

use super::json::{Reply, Request, Secret};
use super::ping::Pong;
use super::socket::Places;
use crate::status::Status;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Timeout of an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval between two checks whether an instance has ended.
const INTERVAL: Duration = Duration::from_millis(20);

/// Why a request to an instance failed.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No instance has this name.
    #[error("`{0}` is not running; `seikan status` lists what is")]
    NotRunning(String),
    /// Permission denied: this user does not own the instance.
    #[error(
        "cannot connect to {}: permission denied; run as the user that runs the tunnel, usually root",
        path.display()
    )]
    Forbidden {
        /// Path of its socket or directory.
        path: PathBuf,
    },
    /// The instance does not answer.
    #[error(
        "`{name}` does not answer at {}: {error}; it may still be starting: try again, or end the process whose id is in {}",
        path.display(),
        lock.display()
    )]
    Silent {
        /// The interface.
        name: String,
        /// Its socket.
        path: PathBuf,
        /// Its lock.
        lock: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The instance rejected the request.
    #[error("`{name}` refuses: {reason}")]
    Refused {
        /// The interface.
        name: String,
        /// The reason it gave.
        reason: String,
    },
    /// The instance still runs after the timeout.
    #[error(
        "`{name}` still runs {} s after it was asked to stop{}: a hook may be running; wait, or end it with `kill \
         -9`, which removes its interface but may leave rules and name servers behind",
        waited.as_secs(),
        pid.map_or_else(String::new, |pid| format!(" as process {pid}"))
    )]
    StillRunning {
        /// The interface.
        name: String,
        /// The process.
        pid: Option<u32>,
        /// Time waited.
        waited: Duration,
    },
}

/// A ping that was requested. Readable once the answer has arrived.
#[derive(Debug)]
pub struct Asked {
    places: Places,
    name: String,
    stream: UnixStream,
}

/// Returns the names of the instances that run on this host.
///
/// # Errors
/// The run directory cannot be read.
pub fn running(places: &Places) -> Result<Vec<String>, AskError> {
    let forbidden = |_| AskError::Forbidden {
        path: places.run.clone(),
    };
    let mut names = places.names().map_err(forbidden)?;
    // A request to an instance that cannot be examined fails with the reason.
    names.retain(|name| places.is_running(name).unwrap_or(true));
    Ok(names)
}

/// Requests the status of an instance.
///
/// # Errors
/// See [`AskError`].
pub fn status(places: &Places, name: &str) -> Result<Status, AskError> {
    let (reply, _) = ask(places, name, Request::Status)?;
    reply
        .status
        .ok_or_else(|| silent(places, name, io::ErrorKind::InvalidData.into()))
}

/// Requests an instance to stop, and waits at most `patience` until it has.
///
/// # Errors
/// See [`AskError`].
pub fn stop(places: &Places, name: &str, patience: Duration) -> Result<(), AskError> {
    let begun = Instant::now();
    let (reply, _connection) = ask(places, name, Request::Stop)?;
    while places.is_running(name).unwrap_or(false) {
        if begun.elapsed() >= patience {
            return Err(AskError::StillRunning {
                name: name.into(),
                pid: reply.pid,
                waited: patience,
            });
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// Requests an instance to ping a peer, given by name, address or key; the result follows within
/// [`super::ping::PATIENCE`].
///
/// # Errors
/// See [`AskError`].
pub fn ping(places: &Places, name: &str, peer: &str) -> Result<Asked, AskError> {
    let peer = peer.to_owned();
    begin(places, name, &Request::Ping { peer })
}

/// Requests an instance to adopt another private key, in base64, and to keep all sessions.
///
/// # Errors
/// See [`AskError`]; refused if the instance is not a member of a mesh, or is a gateway.
pub fn rotate(places: &Places, name: &str, private_key: &str) -> Result<(), AskError> {
    let private_key = Secret::new(private_key);
    ask(places, name, Request::Rotate { private_key }).map(drop)
}

impl Asked {
    /// Waits for the result of a [`ping`].
    ///
    /// # Errors
    /// See [`AskError`]; refused if there is no such peer.
    pub fn pong(&self) -> Result<Pong, AskError> {
        let reply = self.reply()?;
        reply
            .ping
            .ok_or_else(|| self.silent(io::ErrorKind::InvalidData.into()))
    }

    fn reply(&self) -> Result<Reply, AskError> {
        let read = || -> io::Result<Reply> {
            let mut reply = String::new();
            BufReader::new(&self.stream).read_line(&mut reply)?;
            Ok(serde_json::from_str(&reply)?)
        };
        let reply = read().map_err(|error| self.silent(error))?;
        if !reply.ok {
            return Err(AskError::Refused {
                name: self.name.clone(),
                reason: reply.error.unwrap_or_default(),
            });
        }
        Ok(reply)
    }

    fn silent(&self, error: io::Error) -> AskError {
        silent(&self.places, &self.name, error)
    }
}

impl AsFd for Asked {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn ask(places: &Places, name: &str, request: Request) -> Result<(Reply, UnixStream), AskError> {
    let asked = begin(places, name, &request)?;
    Ok((asked.reply()?, asked.stream))
}

fn begin(places: &Places, name: &str, request: &Request) -> Result<Asked, AskError> {
    let path = places.control(name);
    let stream = UnixStream::connect(&path).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => AskError::Forbidden { path: path.clone() },
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            if !places.is_running(name).unwrap_or(false) =>
        {
            AskError::NotRunning(name.into())
        }
        _ => silent(places, name, error),
    })?;
    let send = || -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = Zeroizing::new(serde_json::to_vec(request)?);
        line.push(b'\n');
        (&stream).write_all(&line)
    };
    send().map_err(|error| silent(places, name, error))?;
    Ok(Asked {
        places: places.clone(),
        name: name.into(),
        stream,
    })
}

fn silent(places: &Places, name: &str, error: io::Error) -> AskError {
    let error = match error.kind() {
        // The error of a socket's timeout.
        io::ErrorKind::WouldBlock => {
            let text = format!("no answer within {} s", PATIENCE.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, text)
        }
        _ => error,
    };
    AskError::Silent {
        name: name.into(),
        path: places.control(name),
        lock: places.lock(name),
        error,
    }
}
