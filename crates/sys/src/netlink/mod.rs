//! rtnetlink(7), synchronous: interfaces, addresses, neighbours, routes, policy rules and
//! notifications.
//!
//! A method in [`link`], [`address`], [`neighbour`], [`route`] or [`rule`] builds a typed message
//! (`netlink-packet-route`). `Netlink::exchange` numbers it, sends it, and reads until the kernel's
//! acknowledgement or the end of the dump; it passes each reply to the caller's parser. A refusal
//! becomes a [`NetlinkError`] with the action, its object and advice.
//!
//! A netlink socket belongs to the network namespace of the thread that opened it, also when that
//! thread moves to another one.
//!
//! Replies are parsed attribute by attribute, and unknown attributes are skipped, so a newer kernel
//! cannot break a listing.

pub mod address;
pub mod diag;
pub mod error;
pub mod event;
pub mod link;
pub mod neighbour;
pub mod qdisc;
pub mod route;
pub mod rule;
pub mod shaper;
pub mod topology;
pub mod wireguard;

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST,
    NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP, NLMSG_OVERRUN, NetlinkBuffer, NetlinkMessage,
    NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

pub use address::{Address, AddressOptions};
pub use error::NetlinkError;
pub use event::{Event, Group, Subscription};
pub use link::{LinkInfo, LinkStats};
pub use neighbour::Neighbour;
pub use netlink_packet_route::neighbour::NeighbourState;
pub use netlink_packet_route::route::{RouteScope, RouteType};
pub use qdisc::QdiscStats;
pub use route::{Route, RouteLookup};
pub use rule::Rule;
pub use topology::LinkNode;

use error::Fault;

/// The main routing table (`RT_TABLE_MAIN`).
pub const TABLE_MAIN: u32 = libc::RT_TABLE_MAIN as u32;

/// The kernel fills at most 32 KiB per datagram of a dump (`netlink_dump()`, af_netlink.c).
const BUFFER_SIZE: usize = 64 * 1024;
/// `struct nlmsghdr`.
const HEADER_SIZE: usize = 16;
/// `NLMSGERR_ATTR_MSG`: the kernel's message about a refusal.
const NLMSGERR_ATTR_MSG: u16 = 1;
/// Maximum number of attempts for a dump that races with a change.
const DUMP_TRIES: usize = 16;

/// IPv4 or IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// `AF_INET`
    V4,
    /// `AF_INET6`
    V6,
}

impl Family {
    /// Returns the family of an address.
    pub fn of(address: std::net::IpAddr) -> Self {
        if address.is_ipv4() {
            Self::V4
        } else {
            Self::V6
        }
    }
}

impl From<Family> for netlink_packet_route::AddressFamily {
    fn from(family: Family) -> Self {
        match family {
            Family::V4 => Self::Inet,
            Family::V6 => Self::Inet6,
        }
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// A connection to the kernel's routing and link tables in one network namespace.
///
/// `Send`, not `Sync`: two threads on one socket would read each other's replies.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: Cell<u32>,
    buffer: RefCell<Vec<u8>>,
}

impl Netlink {
    /// Opens a socket in the calling thread's network namespace. This needs no privilege; changes
    /// need `CAP_NET_ADMIN` there.
    pub fn open() -> Result<Self, NetlinkError> {
        let socket = open_socket().map_err(|source| NetlinkError::Open { source })?;
        Ok(Self {
            socket,
            sequence: Cell::new(1),
            buffer: RefCell::new(vec![0; BUFFER_SIZE]),
        })
    }

    /// Sends a request that changes something and waits for the kernel's acknowledgement. `action`
    /// completes "cannot ...".
    fn change(
        &self,
        message: RouteNetlinkMessage,
        flags: u16,
        action: impl FnOnce(&Self) -> String,
    ) -> Result<(), NetlinkError> {
        self.exchange(message, NLM_F_ACK | flags, |_, _| ())
            .map_err(|fault| fault.into_error(action(self)))
    }

    /// Sends a request for one object and parses the replies.
    fn get<T>(
        &self,
        message: RouteNetlinkMessage,
        mut parse: impl FnMut(u16, &[u8]) -> Option<T>,
        action: impl FnOnce(&Self) -> String,
    ) -> Result<Option<T>, NetlinkError> {
        let mut found = None;
        self.exchange(message, NLM_F_ACK, |kind, payload| {
            if found.is_none() {
                found = parse(kind, payload);
            }
        })
        .map_err(|fault| fault.into_error(action(self)))?;
        Ok(found)
    }

    /// Lists all objects of a kind. A dump during which the table changed is repeated, so that the
    /// list is consistent.
    fn dump<T>(
        &self,
        message: RouteNetlinkMessage,
        mut parse: impl FnMut(u16, &[u8]) -> Option<T>,
        action: impl FnOnce(&Self) -> String,
    ) -> Result<Vec<T>, NetlinkError> {
        let mut list = Vec::new();
        for _ in 0..DUMP_TRIES {
            list.clear();
            let outcome = self.exchange(message.clone(), NLM_F_DUMP, |kind, payload| {
                list.extend(parse(kind, payload));
            });
            match outcome {
                Ok(()) => return Ok(list),
                Err(Fault::Interrupted) => continue,
                Err(fault) => return Err(fault.into_error(action(self))),
            }
        }
        Err(Fault::Interrupted.into_error(action(self)))
    }

    /// Sends a request and reads all its replies.
    fn exchange(
        &self,
        message: RouteNetlinkMessage,
        flags: u16,
        mut reply: impl FnMut(u16, &[u8]),
    ) -> Result<(), Fault> {
        let sequence = self.sequence.get();
        self.sequence.set(sequence.wrapping_add(1).max(1));
        let mut request = NetlinkMessage::from(message);
        request.header.flags = NLM_F_REQUEST | flags;
        request.header.sequence_number = sequence;
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        let mut buffer = self.buffer.borrow_mut();
        converse(&self.socket, &bytes, sequence, &mut buffer, &mut reply)
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends an encoded request and reads its replies until the kernel's acknowledgement or the end of
/// the dump.
fn converse(
    socket: &Socket,
    request: &[u8],
    sequence: u32,
    buffer: &mut [u8],
    reply: &mut dyn FnMut(u16, &[u8]),
) -> Result<(), Fault> {
    socket.send(request, 0).map_err(Fault::Io)?;
    let mut interrupted = false;
    loop {
        let datagram = receive(socket, buffer, 0).map_err(Fault::Io)?;
        for message in Messages(datagram) {
            let message = message?;
            if message.sequence_number() != sequence {
                continue; // the rest of an exchange that ended early
            }
            interrupted |= message.flags() & NLM_F_DUMP_INTR != 0;
            match message.message_type() {
                NLMSG_ERROR => return refusal(&message),
                NLMSG_DONE => {
                    refusal(&message)?;
                    return if interrupted {
                        Err(Fault::Interrupted)
                    } else {
                        Ok(())
                    };
                }
                NLMSG_NOOP => {}
                NLMSG_OVERRUN => return Err(Fault::Malformed("data lost".into())),
                kind => reply(kind, message.payload()),
            }
        }
    }
}

/// Opens a socket for routes.
fn open_socket() -> io::Result<Socket> {
    connected(NETLINK_ROUTE)
}

/// Opens a socket connected to the kernel (port 0), so that datagrams of other processes do not
/// reach it.
fn connected(protocol: isize) -> io::Result<Socket> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    // Both only improve error messages; an old kernel without them still works.
    let _ = socket.set_ext_ack(true);
    let _ = socket.set_cap_ack(true);
    Ok(socket)
}

/// Reads one datagram. `flags` are those of recv(2); a datagram longer than the buffer is an error.
fn receive<'a>(socket: &Socket, buffer: &'a mut [u8], flags: i32) -> io::Result<&'a [u8]> {
    let length = loop {
        match socket.recv(&mut &mut buffer[..], libc::MSG_TRUNC | flags) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => break other?,
        }
    };
    buffer.get(..length).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("netlink datagram of {length} bytes"),
        )
    })
}

/// The messages of one datagram.
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Result<NetlinkBuffer<&'a [u8]>, Fault>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.len() < HEADER_SIZE {
            return None;
        }
        let message = match NetlinkBuffer::new_checked(self.0) {
            Ok(message) => message,
            Err(error) => {
                self.0 = &[];
                return Some(Err(Fault::Malformed(error.to_string())));
            }
        };
        let length = message.length() as usize;
        let message = NetlinkBuffer::new(&self.0[..length]);
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some(Ok(message))
    }
}

/// Reads the result in `NLMSG_ERROR` or `NLMSG_DONE`, with the kernel's message if there is one
/// (Documentation/userspace-api/netlink/intro.rst, "Ext ACK").
fn refusal(message: &NetlinkBuffer<&[u8]>) -> Result<(), Fault> {
    let payload = message.payload();
    let Some(code) = payload.first_chunk::<4>() else {
        return Ok(()); // NLMSG_DONE may be empty
    };
    let errno = i32::from_ne_bytes(*code);
    if errno == 0 {
        return Ok(());
    }
    let mut attributes = 4;
    if message.message_type() == NLMSG_ERROR {
        // The refused request follows, completely or only its header.
        attributes += match (
            payload[4..].first_chunk::<4>(),
            message.flags() & NLM_F_CAPPED,
        ) {
            (Some(length), 0) => u32::from_ne_bytes(*length) as usize,
            _ => HEADER_SIZE,
        };
    }
    let detail = (message.flags() & NLM_F_ACK_TLVS != 0)
        .then(|| payload.get(attributes.next_multiple_of(4)..))
        .flatten()
        .and_then(|bytes| {
            NlasIterator::new(bytes)
                .map_while(Result::ok)
                .find(|nla| nla.kind() == NLMSGERR_ATTR_MSG)
                .map(|nla| {
                    String::from_utf8_lossy(nla.value())
                        .trim_end_matches('\0')
                        .to_owned()
                })
        });
    Err(Fault::Errno {
        errno: errno.saturating_neg(),
        detail,
    })
}

#[cfg(test)]
mod tests;
