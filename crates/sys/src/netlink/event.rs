//! Notifications of changes of interfaces, addresses and routes.
//!
//! A [`Subscription`] is a file descriptor for epoll; [`Subscription::next_event`] never blocks. If
//! events arrive faster than they are read, the kernel drops some, and the next call returns
//! [`Event::Lost`]: read the state again.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use netlink_sys::Socket;

use super::address::parse_address;
use super::link::parse_link;
use super::route::parse_routes;
use super::{Address, BUFFER_SIZE, LinkInfo, Messages, Netlink, NetlinkError, Route, receive};

/// A kind of notification (a multicast group of rtnetlink(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Interfaces created, changed, removed.
    Link,
    /// Addresses, both families.
    Address,
    /// Routes, both families.
    Route,
    /// Policy routing rules, both families.
    Rule,
}

impl Group {
    fn numbers(self) -> &'static [u32] {
        match self {
            Self::Link => &[libc::RTNLGRP_LINK],
            Self::Address => &[libc::RTNLGRP_IPV4_IFADDR, libc::RTNLGRP_IPV6_IFADDR],
            Self::Route => &[libc::RTNLGRP_IPV4_ROUTE, libc::RTNLGRP_IPV6_ROUTE],
            Self::Rule => &[libc::RTNLGRP_IPV4_RULE, libc::RTNLGRP_IPV6_RULE],
        }
    }
}

/// Something changed in the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An interface was created or changed: up, down, MTU, name, carrier ...
    Link(LinkInfo),
    /// An interface was deleted or moved to another namespace.
    LinkRemoved(LinkInfo),
    /// An address was added or changed its state (an IPv6 address became usable).
    Address(Address),
    /// An address was removed.
    AddressRemoved(Address),
    /// A route was added or replaced.
    Route(Route),
    /// A route was removed. The kernel does not announce IPv4 routes that vanish because their
    /// interface goes down (`fib_sync_down_dev()`), only the [`Event::Link`].
    RouteRemoved(Route),
    /// A rule was removed.
    RuleRemoved,
    /// Events were lost, so the known state may be outdated.
    Lost,
}

/// A stream of events of one namespace.
#[derive(Debug)]
pub struct Subscription {
    socket: Socket,
    buffer: Vec<u8>,
    pending: VecDeque<Event>,
}

impl Netlink {
    /// Subscribes to changes in the calling thread's network namespace.
    pub fn subscribe(groups: &[Group]) -> Result<Subscription, NetlinkError> {
        let open = || -> io::Result<Socket> {
            let socket = super::open_socket()?;
            socket.set_non_blocking(true)?;
            for &number in groups.iter().flat_map(|group| group.numbers()) {
                socket.add_membership(number)?;
            }
            Ok(socket)
        };
        let socket = open().map_err(|source| NetlinkError::Open { source })?;
        Ok(Subscription {
            socket,
            buffer: vec![0; BUFFER_SIZE],
            pending: VecDeque::new(),
        })
    }
}

impl Subscription {
    /// Returns the next event, or `None` if there is none at the moment.
    pub fn next_event(&mut self) -> Result<Option<Event>, NetlinkError> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Ok(Some(event));
            }
            let datagram = match receive(&self.socket, &mut self.buffer, 0) {
                Ok(datagram) => datagram,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    return Ok(Some(Event::Lost));
                }
                // A datagram longer than the buffer was lost.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Ok(Some(Event::Lost));
                }
                Err(source) => {
                    let action = "wait for changes of the network".into();
                    return Err(NetlinkError::Socket { action, source });
                }
            };
            for message in Messages(datagram).map_while(Result::ok) {
                self.pending
                    .extend(parse_event(message.message_type(), message.payload()));
            }
        }
    }
}

impl AsFd for Subscription {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Subscription {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

fn parse_event(kind: u16, payload: &[u8]) -> Vec<Event> {
    match kind {
        libc::RTM_NEWLINK => parse_link(payload).map(Event::Link).into_iter().collect(),
        libc::RTM_DELLINK => parse_link(payload)
            .map(Event::LinkRemoved)
            .into_iter()
            .collect(),
        libc::RTM_NEWADDR => parse_address(payload)
            .map(Event::Address)
            .into_iter()
            .collect(),
        libc::RTM_DELADDR => parse_address(payload)
            .map(Event::AddressRemoved)
            .into_iter()
            .collect(),
        libc::RTM_NEWROUTE => parse_routes(payload)
            .into_iter()
            .map(Event::Route)
            .collect(),
        libc::RTM_DELROUTE => parse_routes(payload)
            .into_iter()
            .map(Event::RouteRemoved)
            .collect(),
        libc::RTM_DELRULE => vec![Event::RuleRemoved],
        _ => Vec::new(),
    }
}
