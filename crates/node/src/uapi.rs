//! WireGuard's cross-platform configuration protocol, which `wg` speaks to user-space tunnels
//! (<https://www.wireguard.com/xplatform/#configuration-protocol>).
//!
//! A client sends `get=1` or `set=1`, lines of `key=value`, and an empty line; it gets lines and
//! `errno=N`, which is 0 or a negative errno, and an empty line. [`Dialogue`] is one client. Lines
//! take effect as they come (a request of ten thousand peers is never held as a whole), and a reply
//! is made in pieces. What stands before a faulty line stays in effect, as in wireguard-go.

mod get;
mod set;
#[cfg(test)]
mod tests;

use crate::control::client::Phase;
use crate::control::output::Output;
use get::Get;
use seikan_proto::keys::PrivateKey;
use seikan_proto::tunnel::{Now, Tunnel};
use seikan_sys::udp::UdpError;
use set::Set;
use std::fmt::Write;
use std::io;

/// Longest line in bytes; the longest good one is a preshared key of 79.
pub const MAX_LINE: usize = 1024;
/// Longest request in bytes: 10,000 peers with a hundred allowed IPs each.
pub const MAX_REQUEST: usize = 64 << 20;

/// Why a request was refused, as the errno that the client gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Not a line of this protocol (EPROTO).
    Protocol,
    /// A key that does not exist, or a value that it cannot have (EINVAL).
    Invalid,
    /// The port has another owner (EADDRINUSE).
    PortInUse,
    /// More than [`MAX_REQUEST`] bytes (E2BIG).
    TooLong,
    /// The system refused; its errno.
    System(i32),
}

impl Refusal {
    /// The number on the wire.
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

/// What is configured.
pub trait Device {
    /// The protocol.
    fn tunnel(&self) -> &Tunnel;
    /// The protocol, to change it.
    fn tunnel_mut(&mut self) -> &mut Tunnel;
    /// The clocks.
    fn now(&self) -> Now;
    /// Our key; `None` after it was taken away.
    fn private_key(&self) -> Option<&PrivateKey>;
    /// Takes on another key, or none.
    fn set_private_key(&mut self, key: Option<PrivateKey>);
    /// The UDP port.
    fn listen_port(&self) -> u16;
    /// Moves to another port; 0 is any.
    fn set_listen_port(&mut self, port: u16) -> Result<(), Refusal>;
    /// The firewall mark; 0 is none.
    fn fwmark(&self) -> u32;
    /// Sets the firewall mark; 0 is none.
    fn set_fwmark(&mut self, mark: u32) -> Result<(), Refusal>;
}

/// One client's requests, one after the other.
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
    Asked,
    /// A reply is being made.
    Get(Get),
    /// Lines are being carried out.
    Set(Set),
    /// Nothing sensible can follow.
    Over,
}

impl Dialogue {
    /// Takes what a client sent; returns how many bytes were used up. The rest is to be offered
    /// again, together with what comes after it: a line that has not ended, or the next request
    /// while a reply is under way.
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

    /// Where it stands.
    pub fn phase(&self) -> Phase {
        match self.state {
            State::Idle => Phase::Idle,
            State::Asked | State::Set(_) => Phase::Asking,
            State::Get(_) => Phase::Replying,
            State::Over => Phase::Over,
        }
    }

    fn line(&mut self, line: &[u8], device: &mut dyn Device, output: &mut Output) {
        match (&mut self.state, line) {
            (State::Idle, b"get=1") => self.state = State::Asked,
            (State::Idle, b"set=1") => self.state = State::Set(Set::default()),
            (State::Asked, b"") => self.state = State::Get(Get::new(device, output)),
            (State::Set(set), b"") => {
                let result = set.result();
                self.finish(result, output);
            }
            (State::Set(set), line) => set.line(line, device),
            (State::Asked, _) => self.refuse(Refusal::Invalid, output),
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
