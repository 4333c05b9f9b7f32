//! A TCP connection inside the tunnel: a socket of smoltcp in a set of its own, so that a packet and a poll cost the same
//! whatever the number of connections.

use crate::device::Device;
use crate::packet::FlowKey;
use smoltcp::iface::{Interface, PollResult, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{ConnectError, Socket, SocketBuffer, State};
use smoltcp::time::Instant;

/// One connection inside the tunnel.
#[derive(Debug)]
pub(crate) struct Inside {
    /// Its ends.
    pub flow: FlowKey,
    /// Bytes of both buffers.
    pub buffer_bytes: usize,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    /// Size of its segments; known when the far end's SYN has arrived.
    mss: u16,
}

/// When a connection has to be polled again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// At this time, if nothing happens before.
    At(Option<Instant>),
    /// As soon as the device is writable.
    Blocked,
}

impl Inside {
    fn new(flow: FlowKey, buffer: usize) -> Inside {
        // Zeroed pages: the kernel provides them when they are used.
        let ring = || SocketBuffer::new(vec![0; buffer]);
        let mut socket = Socket::new(ring(), ring());
        // The programs at both ends decide that.
        socket.set_nagle_enabled(false);
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        Inside {
            flow,
            buffer_bytes: 2 * buffer,
            sockets,
            handle,
            mss: 536,
        }
    }

    /// Starts to connect, with two buffers of `buffer` bytes.
    ///
    /// # Errors
    /// Those of smoltcp: an unspecified address, or two families.
    pub fn connect(
        interface: &mut Interface,
        flow: FlowKey,
        buffer: usize,
    ) -> Result<Inside, ConnectError> {
        let mut inside = Inside::new(flow, buffer);
        let socket = inside.sockets.get_mut::<Socket>(inside.handle);
        socket.connect(interface.context(), flow.remote, flow.local)?;
        Ok(inside)
    }

    /// Makes a connection for a SYN, which has to arrive next. It is answered after [`Inside::accept`].
    pub fn pending(flow: FlowKey, buffer: usize) -> Option<Inside> {
        let mut inside = Inside::new(flow, buffer);
        let socket = inside.socket();
        socket.listen(flow.local).ok()?;
        socket.pause_synack(true);
        Some(inside)
    }

    /// Answers the SYN.
    pub fn accept(&mut self) {
        self.socket().pause_synack(false);
    }

    /// The socket.
    pub fn socket(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    /// The state of the socket.
    pub fn state(&self) -> State {
        self.sockets.get::<Socket>(self.handle).state()
    }

    /// Notes the MSS of the far end's SYN, which has been lowered to what fits the tunnel.
    pub fn set_mss(&mut self, mss: u16) {
        self.mss = mss.max(48);
    }

    /// Processes the packet that has arrived at the device.
    pub fn ingress(&mut self, interface: &mut Interface, device: &mut Device, now: Instant) {
        device.mss = self.mss;
        interface.poll_ingress_single(now, device, &mut self.sockets);
    }

    /// Sends what may be sent.
    pub fn egress(&mut self, interface: &mut Interface, device: &mut Device, now: Instant) -> Next {
        device.mss = self.mss;
        loop {
            if device.is_blocked() {
                return Next::Blocked;
            }
            if interface.poll_egress(now, device, &mut self.sockets) == PollResult::None {
                break;
            }
        }
        Next::At(interface.poll_at(now, &self.sockets))
    }
}
