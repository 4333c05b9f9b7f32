//! Client side of the control socket, for the command line.

use super::json::{Reply, Request, Secret};
use super::ping::Pong;
use super::socket::RuntimeDirs;
use crate::status::Status;
use seikan_sys::process::peer_pid;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Maximum length of an answer in bytes, as of some 100,000 peers. A compromised daemon may send without end.
pub const MAX_ANSWER: u64 = 64 << 20;
/// Timeout of a daemon that sends nothing.
const PATIENCE: Duration = Duration::from_secs(5);
/// Timeout of a whole answer, however steadily it comes.
const WHOLE: Duration = Duration::from_secs(30);
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
pub struct PendingPing {
    dirs: RuntimeDirs,
    name: String,
    stream: UnixStream,
}

/// Returns the names of the instances that run on this host.
///
/// # Errors
/// The run directory cannot be read.
pub fn running(dirs: &RuntimeDirs) -> Result<Vec<String>, AskError> {
    let forbidden = |_| AskError::Forbidden {
        path: dirs.run.clone(),
    };
    let mut names = dirs.names().map_err(forbidden)?;
    // A request to an instance that cannot be examined fails with the reason.
    names.retain(|name| dirs.is_running(name).unwrap_or(true));
    Ok(names)
}

/// Requests the status of an instance.
///
/// # Errors
/// See [`AskError`].
pub fn status(dirs: &RuntimeDirs, name: &str) -> Result<Status, AskError> {
    let (reply, _) = ask(dirs, name, Request::Status)?;
    reply
        .status
        .ok_or_else(|| silent(dirs, name, io::ErrorKind::InvalidData.into()))
}

/// Requests the metrics of an instance, in the OpenMetrics text format.
///
/// # Errors
/// See [`AskError`].
pub fn metrics(dirs: &RuntimeDirs, name: &str) -> Result<String, AskError> {
    let (reply, _) = ask(dirs, name, Request::Metrics)?;
    reply
        .metrics
        .ok_or_else(|| silent(dirs, name, io::ErrorKind::InvalidData.into()))
}

/// Returns the process of an instance. The kernel names it: a compromised daemon cannot name another.
///
/// # Errors
/// See [`AskError`].
pub fn pid(dirs: &RuntimeDirs, name: &str) -> Result<u32, AskError> {
    let stream = connect(dirs, name)?;
    peer_pid(&stream).map_err(|error| silent(dirs, name, error))
}

/// Requests an instance to stop, and waits at most `patience` until it has.
///
/// # Errors
/// See [`AskError`].
pub fn stop(dirs: &RuntimeDirs, name: &str, patience: Duration) -> Result<(), AskError> {
    let started_at = Instant::now();
    let (reply, _connection) = ask(dirs, name, Request::Stop)?;
    while dirs.is_running(name).unwrap_or(false) {
        if started_at.elapsed() >= patience {
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
pub fn ping(dirs: &RuntimeDirs, name: &str, peer: &str) -> Result<PendingPing, AskError> {
    let peer = peer.to_owned();
    begin(dirs, name, &Request::Ping { peer })
}

/// Requests an instance to adopt another private key, in base64, and to keep all sessions.
///
/// # Errors
/// See [`AskError`]; refused if the instance is not a member of a mesh, or is a gateway.
pub fn rotate(dirs: &RuntimeDirs, name: &str, private_key: &str) -> Result<(), AskError> {
    let private_key = Secret::new(private_key);
    ask(dirs, name, Request::Rotate { private_key }).map(drop)
}

impl PendingPing {
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
            let line = read_line(&self.stream, WHOLE)?;
            Ok(serde_json::from_slice(&line)?)
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
        silent(&self.dirs, &self.name, error)
    }
}

impl AsFd for PendingPing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn ask(dirs: &RuntimeDirs, name: &str, request: Request) -> Result<(Reply, UnixStream), AskError> {
    let pending = begin(dirs, name, &request)?;
    Ok((pending.reply()?, pending.stream))
}

fn begin(dirs: &RuntimeDirs, name: &str, request: &Request) -> Result<PendingPing, AskError> {
    let stream = connect(dirs, name)?;
    let send = || -> io::Result<()> {
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = Zeroizing::new(serde_json::to_vec(request)?);
        line.push(b'\n');
        (&stream).write_all(&line)
    };
    send().map_err(|error| silent(dirs, name, error))?;
    Ok(PendingPing {
        dirs: dirs.clone(),
        name: name.into(),
        stream,
    })
}

/// Reads a line of at most [`MAX_ANSWER`] bytes that has come after `patience`.
fn read_line(stream: &UnixStream, patience: Duration) -> io::Result<Vec<u8>> {
    let until = Instant::now() + patience;
    let mut line = Vec::new();
    let mut answer = BufReader::new(Timed { stream, until }).take(MAX_ANSWER);
    answer.read_until(b'\n', &mut line)?;
    if line.ends_with(b"\n") {
        return Ok(line);
    }
    Err(match answer.limit() {
        0 => io::Error::other(format!("its answer has more than {MAX_ANSWER} bytes")),
        _ => io::ErrorKind::UnexpectedEof.into(),
    })
}

/// A stream that is read until a deadline.
struct Timed<'a> {
    stream: &'a UnixStream,
    until: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, "its answer does not end");
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late());
        }
        self.stream.set_read_timeout(Some(left.min(PATIENCE)))?;
        match self.stream.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && left < PATIENCE => {
                Err(late())
            }
            read => read,
        }
    }
}

fn connect(dirs: &RuntimeDirs, name: &str) -> Result<UnixStream, AskError> {
    let path = dirs.control(name);
    UnixStream::connect(&path).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => AskError::Forbidden { path: path.clone() },
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            if !dirs.is_running(name).unwrap_or(false) =>
        {
            AskError::NotRunning(name.into())
        }
        _ => silent(dirs, name, error),
    })
}

fn silent(dirs: &RuntimeDirs, name: &str, error: io::Error) -> AskError {
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
        path: dirs.control(name),
        lock: dirs.lock(name),
        error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error of reading an answer of which `block` is sent again and again, with `pause` between.
    fn error_of(block: &[u8], pause: Duration, patience: Duration) -> io::Error {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while (&theirs).write_all(block).is_ok() {
                    std::thread::sleep(pause);
                }
            });
            let error = read_line(&ours, patience).expect_err("no answer");
            drop(ours);
            error
        })
    }

    #[test]
    fn an_answer_without_end_is_read_to_a_limit() {
        let block = vec![b' '; 1 << 20];
        let error = error_of(&block, Duration::ZERO, Duration::from_secs(600));
        assert!(error.to_string().contains("more than 67108864"), "{error}");
    }

    #[test]
    fn an_answer_that_drips_is_given_up() {
        let pause = Duration::from_millis(10);
        let error = error_of(b" ", pause, Duration::from_millis(200));
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    }

    #[test]
    fn an_answer_that_breaks_off_is_none() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        (&theirs).write_all(b"{}").expect("sent");
        drop(theirs);
        let error = read_line(&ours, PATIENCE).expect_err("no answer");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
    }
}
