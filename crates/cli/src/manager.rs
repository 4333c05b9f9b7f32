//! The service manager, if there is one that waits until this process is ready (sd_notify(3)).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use sd_notify::NotifyState;

/// A socket to it, connected before privileges are given up, after which no other can be.
pub struct Manager(Option<UnixDatagram>);

impl Manager {
    /// Connects to the socket that the environment names.
    pub fn connect() -> Manager {
        let address = std::env::var_os("NOTIFY_SOCKET");
        Manager(address.and_then(|address| connected(&address).ok()))
    }

    /// Tells it how things go, once: a process that was taken over could send to others by this socket. Without a manager there is
    /// nobody to tell.
    pub fn tell(&mut self, states: &[NotifyState<'_>]) {
        let lines: Vec<String> = states.iter().map(ToString::to_string).collect();
        if let Some(socket) = self.0.take() {
            let _ = socket.send(lines.join("\n").as_bytes());
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
