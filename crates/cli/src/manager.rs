//! Notification of the service manager, if it waits for readiness (sd_notify(3)).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use sd_notify::NotifyState;

use crate::screen::joined;

/// A connection to the service manager. It has to be made before privileges are dropped.
pub struct Manager(Option<UnixDatagram>);

impl Manager {
    /// Connects to the socket that the environment names.
    pub fn connect() -> Manager {
        let address = std::env::var_os("NOTIFY_SOCKET");
        Manager(address.and_then(|address| connected(&address).ok()))
    }

    /// Reports that this service is ready, with a status line, and closes the connection: a
    /// compromised process could use it. Does nothing without a manager.
    pub fn notify_ready(&mut self, status: &str) {
        let states = [NotifyState::Ready, NotifyState::Status(status)];
        if let Some(socket) = self.0.take() {
            let _ = socket.send(joined(states, "\n").as_bytes());
        }
    }
}

fn connected(address: &OsStr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    match address.as_bytes().strip_prefix(b"@") {
        Some(name) => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        None => socket.connect(address)?,
    }
    Ok(socket)
}
