//! WireGuard's cross-platform configuration protocol, which `wg` speaks to user-space tunnels
//! (<https://www.wireguard.com/xplatform/#configuration-protocol>).
//!
//! A client sends `get=1` or `set=1`, lines of `key=value`, and an empty line; the reply is lines, then
//! `errno=N` with 0 or a negative errno, and an empty line. [`Dialogue`] is one client. Lines take effect as
//! they arrive, so that a request of ten thousand peers is never stored as a whole, and a reply is sent in
//! pieces. Lines before an invalid one stay in effect, as in wireguard-go.

mod get;
mod set;
#[cfg(test)]
mod tests;

use crate::output::Output;
use crate::output::Phase;
use get::Get;
use seikan_proto::keys::PrivateKey;
use seikan_proto::tunnel::{Now, Tunnel};
use seikan_sys::udp::UdpError;
use set::Set;
use std::fmt::Write;
use std::io;

/// Maximum length of a line in bytes; the longest valid one is a preshared key of 79.
pub const MAX_LINE: usize = 1024;
/// Maximum length of a request in bytes: 10,000 peers with a hundred allowed IPs each.
pub const MAX_REQUEST: usize = 64 << 20;

/// Why a request was refused, as the errno that the client gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The line does not belong to this protocol (EPROTO).
    Protocol,
    /// An unknown key, or an invalid value (EINVAL).
    Invalid,
    /// The port is in use (EADDRINUSE).
    PortInUse,
    /// More than [`MAX_REQUEST`] bytes (E2BIG).
    TooLong,
    /// Another error of the system, with its errno.
    System(i32),
}

impl Refusal {
    /// Returns the number on the wire.
    pub fn errno(self) -> i32 {
        match self {
            Refusal::TooLong => -7,
            Refusal::Invalid => -22,
            Refusal::Protocol => -71,
            Refusal::PortInUse => -98,
            Refusal::System(errno) => -errno.abs(),
        }
    }
}

impl From<UdpError> for Refusal {
    fn from(error: UdpError) -> Refusal {
        let errno = |source: &io::Error| Refusal::System(source.raw_os_error().unwrap_or(EIO));
        match &error {
            UdpError::PortInUse { .. } => Refusal::PortInUse,
            UdpError::AddressNotAvailable { .. } => Refusal::System(EADDRNOTAVAIL),
            UdpError::NoFamily { source, .. }
            | UdpError::Mark { source, .. }
            | UdpError::System { source, .. } => errno(source),
        }
    }
}

const EIO: i32 = 5;
const EADDRNOTAVAIL: i32 = 99;

/// The device that the protocol configures.
pub trait Device {
    /// Returns the tunnel.
    fn tunnel(&self) -> &Tunnel;
    /// Returns the tunnel, to change it.
    fn tunnel_mut(&mut self) -> &mut Tunnel;
    /// Returns the clocks.
    fn now(&self) -> Now;
    /// Returns the private key; `None` after it was removed.
    fn private_key(&self) -> Option<&PrivateKey>;
    /// Sets another private key, or none.
    fn set_private_key(&mut self, key: Option<PrivateKey>);
    /// Returns the UDP port.
    fn listen_port(&self) -> u16;
    /// Moves to another port; 0 lets the kernel choose.
    fn set_listen_port(&mut self, port: u16) -> Result<(), Refusal>;
    /// Returns the firewall mark; 0 is none.
    fn fwmark(&self) -> u32;
    /// Sets the firewall mark; 0 is none.
    fn set_fwmark(&mut self, mark: u32) -> Result<(), Refusal>;
}

/// The requests of one client, in order.
#[derive(Debug, Default)]
pub struct Dialogue {
    state: State,
    /// Bytes of the request so far.
    length: usize,
}

#[derive(Debug, Default)]
enum State {
    /// Between requests.
    #[default]
    Idle,
    /// `get=1` was read, its empty line not yet.
    GetRequested,
    /// A reply is being sent.
    Get(Get),
    /// Lines are being applied.
    Set(Set),
    /// The dialogue is over after an error.
    Over,
}

impl Dialogue {
    /// Consumes input of the client and returns the number of bytes consumed. The rest is passed again with the
    /// bytes that follow it: an incomplete line, or the next request while a reply is being sent.
    pub fn take(&mut self, input: &[u8], device: &mut dyn Device, output: &mut Output) -> usize {
        let mut used = 0;
        while matches!(self.phase(), Phase::Idle | Phase::Asking) {
            let rest = &input[used..];
            let Some(end) = rest.iter().take(MAX_LINE).position(|b| *b == b'\n') else {
                if rest.len() >= MAX_LINE {
                    self.refuse(Refusal::Protocol, output);
                }
                break;
            };
            used += end + 1;
            self.length += end + 1;
            if self.length > MAX_REQUEST {
                self.refuse(Refusal::TooLong, output);
            } else {
                self.line(&rest[..end], device, output);
            }
        }
        used
    }

    /// While [`Phase::Replying`]: adds the next piece of the reply.
    pub fn give(&mut self, device: &dyn Device, output: &mut Output) {
        if let State::Get(get) = &mut self.state
            && !get.give(device, output)
        {
            self.finish(Ok(()), output);
        }
    }

    /// Returns the current state.
    pub fn phase(&self) -> Phase {
        match self.state {
            State::Idle => Phase::Idle,
            State::GetRequested | State::Set(_) => Phase::Asking,
            State::Get(_) => Phase::Replying,
            State::Over => Phase::Over,
        }
    }

    fn line(&mut self, line: &[u8], device: &mut dyn Device, output: &mut Output) {
        match (&mut self.state, line) {
            (State::Idle, b"get=1") => self.state = State::GetRequested,
            (State::Idle, b"set=1") => self.state = State::Set(Set::default()),
            (State::GetRequested, b"") => self.state = State::Get(Get::new(device, output)),
            (State::Set(set), b"") => {
                let result = set.result();
                self.finish(result, output);
            }
            (State::Set(set), line) => set.line(line, device),
            (State::GetRequested, _) => self.refuse(Refusal::Invalid, output),
            // Another protocol, or the middle of a request.
            _ => self.state = State::Over,
        }
    }

    fn finish(&mut self, result: Result<(), Refusal>, output: &mut Output) {
        let errno = result.map_or_else(Refusal::errno, |()| 0);
        let _ = write!(output, "errno={errno}\n\n");
        *self = Dialogue::default();
    }

    fn refuse(&mut self, refusal: Refusal, output: &mut Output) {
        self.finish(Err(refusal), output);
        self.state = State::Over;
    }
}
