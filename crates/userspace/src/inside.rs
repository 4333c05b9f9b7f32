//! A TCP connection inside the tunnel: a socket of smoltcp in a set of its own, so that the cost of
//! a packet or a poll does not grow with the number of connections. [`Sender`] controls its
//! sending.

use crate::device::Device;
use crate::packet::{self, FlowKey, Inbound};
use crate::sender::{self, Action, Sender};
use seikan_wire::ip::PROTO_TCP;
use seikan_wire::{VNET_HDR_LEN, tcp};
use smoltcp::iface::{Interface, PollResult, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{CongestionControl, ConnectError, Socket, SocketBuffer, State};
use std::time::{Duration, Instant};

/// A time longer than smoltcp's longest retransmission timeout. When smoltcp's clock is this far
/// after the last transmission, it sends everything again.
const LATER: Duration = Duration::from_secs(61);

/// One connection inside the tunnel.
#[derive(Debug)]
pub(crate) struct Inside {
    /// The addresses of both ends.
    pub flow: FlowKey,
    /// Size of both buffers together, in bytes.
    pub buffer_bytes: usize,
    /// Sequence number of the SYN of this end, once it was sent.
    pub syn: Option<u32>,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    /// Maximum segment size in bytes; known once the far end's SYN has arrived.
    mss: u16,
    /// Sequence number of the far end's first byte, and number of bytes taken from the receive
    /// buffer (modulo 2^32).
    first: u32,
    taken: u32,
    /// Whether the far end acknowledges selectively.
    selective: bool,
    /// Window scale of the far end; `None`: the far end does not scale windows.
    scale: Option<u8>,
    sender: Option<Sender>,
    /// The last window field that smoltcp has seen.
    window: u16,
    action: Action,
    /// The last time in the future that was passed to smoltcp to make it send again.
    later: Option<Instant>,
    /// When the last segment of the far end arrived, and when it was last probed.
    heard_at: Option<Instant>,
    probed_at: Option<Instant>,
}

/// When a connection has to be polled again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// At this time, if nothing happens before.
    At(Option<Instant>),
    /// As soon as the device is writable.
    Blocked,
}

/// The parts of the engine that a connection is polled with.
pub(crate) struct Net<'a> {
    pub interface: &'a mut Interface,
    pub device: &'a mut Device,
    /// Start of smoltcp's clock.
    pub epoch: Instant,
    pub now: Instant,
    pub mtu: usize,
}

impl Net<'_> {
    fn clock(&self) -> smoltcp::time::Instant {
        clock(self.epoch, self.now)
    }
}

/// Converts a time to smoltcp's clock, which starts at `epoch`.
pub(crate) fn clock(epoch: Instant, at: Instant) -> smoltcp::time::Instant {
    let elapsed = at.saturating_duration_since(epoch);
    smoltcp::time::Instant::from_micros(elapsed.as_micros() as i64)
}

impl Inside {
    fn new(flow: FlowKey, buffer: usize) -> Inside {
        // The kernel provides zeroed pages only when they are used.
        let ring = || SocketBuffer::new(vec![0; buffer]);
        let mut socket = Socket::new(ring(), ring());
        // The programs at both ends decide when to send.
        socket.set_nagle_enabled(false);
        socket.set_congestion_control(CongestionControl::None);
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        Inside {
            flow,
            buffer_bytes: 2 * buffer,
            syn: None,
            sockets,
            handle,
            mss: 536,
            first: 0,
            taken: 0,
            selective: false,
            scale: None,
            sender: None,
            window: 0,
            action: Action::None,
            later: None,
            heard_at: None,
            probed_at: None,
        }
    }

    /// Starts to connect, with two buffers of `buffer` bytes.
    ///
    /// # Errors
    /// Errors of smoltcp: an unspecified address, or addresses of two families.
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

    /// Makes a connection for a SYN, which must be passed to [`Inside::ingress`] next. The SYN is
    /// answered after [`Inside::accept`].
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

    /// Returns the socket. Bytes taken from it must be reported to [`Inside::on_taken`].
    pub fn socket(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    /// Returns the state of the socket.
    pub fn state(&self) -> State {
        self.sockets.get::<Socket>(self.handle).state()
    }

    /// Records that bytes were taken from the receive buffer.
    pub fn on_taken(&mut self, bytes: u64) {
        self.taken = self.taken.wrapping_add(bytes as u32);
    }

    /// Passes the segment in the device's inbox to smoltcp.
    pub fn ingress(&mut self, net: &mut Net<'_>, packet: &Inbound) {
        self.heard_at = Some(net.now);
        let range = VNET_HDR_LEN..VNET_HDR_LEN + packet.end;
        let is_v6 = self.flow.local.is_ipv6();
        let segment = &mut net.device.inbox()[range.clone()][packet.transport_at..];
        let Some(header_len) = tcp::header_len(segment) else {
            return;
        };
        let flags = tcp::flags(segment);
        let una = self.sender.as_ref().map(Sender::una);
        let seq = tcp::seq(segment);
        let end = seq.wrapping_add((segment.len() - header_len) as u32);
        let expected = self.expected();
        // smoltcp discards a segment whose bytes have all arrived before, together with its
        // acknowledgement.
        let is_old = sender::is_before(seq, expected) && !sender::is_before(expected, end);
        if flags & tcp::SYN != 0 {
            // On an open connection, smoltcp answers a SYN and changes nothing (RFC 5961 section
            // 4).
            if matches!(self.state(), State::Listen | State::SynSent) {
                self.on_syn(segment, header_len, packet::max_segment(net.mtu, is_v6));
            }
        } else if flags & (tcp::ACK | tcp::RST) == tcp::ACK
            && !self.read_acknowledgement(segment, header_len, net.now)
        {
            return;
        }
        self.poll_ingress(net, range);
        // Otherwise two ends that both send old segments again would never see each other's
        // acknowledgements.
        if is_old && self.sender.as_ref().map(Sender::una) != una {
            self.tell_acknowledgement(net);
        }
    }

    /// Reads an acknowledgement, and replaces its window by the one for smoltcp. Returns false if
    /// smoltcp must not see the segment, because it would count it as a duplicate.
    fn read_acknowledgement(
        &mut self,
        segment: &mut [u8],
        header_len: usize,
        now: Instant,
    ) -> bool {
        let expected = self.expected();
        let Some(sender) = &mut self.sender else {
            return true;
        };
        // A segment before the expected one does not change the window (RFC 9293 section 3.10.7.4, SND.WL1): a probe of
        // a closed window is one.
        let is_old = sender::is_before(tcp::seq(segment), expected);
        let peer_window = if is_old {
            sender.peer_window()
        } else {
            usize::from(tcp::window(segment)) << self.scale.unwrap_or(0)
        };
        let (header, payload) = segment.split_at(header_len);
        let una = sender.una();
        let action = sender.on_ack(header, payload.len(), peer_window, now);
        if action != Action::None {
            self.action = action;
        }
        let field = field(sender, self.scale);
        let is_plain = payload.is_empty()
            && tcp::flags(segment) & tcp::FIN == 0
            && tcp::seq(segment) == expected;
        if is_plain && tcp::acknowledged(segment) == una && field == self.window {
            return false;
        }
        self.window = field;
        set_window(segment, field);
        true
    }

    fn poll_ingress(&mut self, net: &mut Net<'_>, range: std::ops::Range<usize>) {
        let now = net.clock();
        net.device.mss = self.mss;
        net.device.arrive(range);
        net.interface
            .poll_ingress_single(now, net.device, &mut self.sockets);
        self.note_sent(net);
    }

    /// Reads the options of the far end's SYN, and replaces them by those for smoltcp.
    fn on_syn(&mut self, segment: &mut [u8], header_len: usize, limit: u16) {
        // smoltcp does not verify the checksum, which changes.
        tcp::clamp_mss(segment, limit, true);
        let is_v6 = self.flow.local.is_ipv6();
        self.mss = packet::announced_mss(segment, is_v6).clamp(48, limit);
        self.first = tcp::seq(segment).wrapping_add(1);
        let options = &mut segment[20..header_len];
        self.selective = sender::is_selective(options);
        self.scale = sender::replace_scale(options);
        self.sender = None;
        if tcp::flags(segment) & tcp::ACK != 0 {
            let sender = self.begin(tcp::acknowledged(segment));
            let window = sender.allowed_first(tcp::window(segment));
            set_window(segment, window);
        }
    }

    fn begin(&mut self, first: u32) -> &mut Sender {
        let (mss, selective) = (self.mss, self.selective);
        self.sender
            .get_or_insert_with(|| Sender::new(mss, first, selective))
    }

    fn note_sent(&mut self, net: &mut Net<'_>) {
        for i in 0..net.device.sent.len() {
            let sent = net.device.sent[i];
            if sent.is_syn {
                self.syn = Some(sent.seq);
            }
            if !sent.is_syn {
                if let Some(sender) = &mut self.sender {
                    sender.on_sent(&sent, net.now);
                }
            } else if self.state() != State::SynSent {
                self.begin(sent.seq.wrapping_add(1));
            }
        }
        net.device.sent.clear();
        if let (Some(sender), Some(position)) = (&mut self.sender, net.device.position.take()) {
            sender.on_position(position);
        }
    }

    /// Sends all segments that may be sent, and returns when to poll again.
    pub fn egress(&mut self, net: &mut Net<'_>) -> Next {
        net.device.mss = self.mss;
        if net.device.is_blocked() {
            return Next::Blocked;
        }
        let due = self.sender.as_mut().map(|sender| sender.on_time(net.now));
        if let Some(due) = due.filter(|due| *due != Action::None) {
            self.action = due;
        }
        let mut ends = false;
        match std::mem::replace(&mut self.action, Action::None) {
            Action::None => {}
            Action::Rewind => {
                self.tell_window(net);
                self.rewind();
                // It must be after the last such time, because smoltcp's timer counts from there.
                let later = self.later.map_or(net.now, |at| at.max(net.now)) + LATER;
                self.later = Some(later);
                self.poll_egress(net, later);
            }
            Action::Probe => self.send_probe(net),
            Action::GiveUp => {
                self.socket().abort();
                ends = true;
            }
        }
        loop {
            if net.device.is_blocked() {
                return Next::Blocked;
            }
            if self.poll_egress(net, net.now) == PollResult::None {
                break;
            }
        }
        let now = net.clock();
        let at = net
            .interface
            .poll_at(now, &self.sockets)
            .map(|at| net.epoch + Duration::from_micros(at.total_micros().max(0) as u64));
        let wakeup = self.sender.as_ref().and_then(Sender::wakeup);
        // The end is noticed when the connection is advanced next.
        let wakeup = wakeup.or(ends.then_some(net.now));
        Next::At([at, wakeup].into_iter().flatten().min())
    }

    /// Sends the last segment of a connection that has ended. The device keeps it while the worker
    /// is behind, because nobody can send it later.
    pub fn egress_last(&mut self, net: &mut Net<'_>) {
        net.device.mss = self.mss;
        net.device.keeps = true;
        self.poll_egress(net, net.now);
        net.device.keeps = false;
    }

    /// Returns the time since the last segment of the far end.
    pub fn silence(&self, now: Instant) -> Duration {
        let heard_at = self.heard_at.unwrap_or(now);
        now.saturating_duration_since(heard_at)
    }

    /// Probes the far end to make it answer, unless it was probed within `pause` (RFC 9293 section
    /// 3.8.4). Bytes that may be sent make it answer anyway, so nothing is sent then.
    pub fn probe(&mut self, net: &mut Net<'_>, pause: Duration) {
        let asked = self.probed_at.is_some_and(|at| net.now < at + pause);
        let closed = self.sender.as_ref().is_some_and(Sender::is_closed);
        if asked || self.socket().send_queue() > 0 && !closed {
            return;
        }
        self.probed_at = Some(net.now);
        self.send_probe(net);
    }

    fn send_probe(&mut self, net: &mut Net<'_>) {
        let ack = self.expected();
        let Some(sender) = &self.sender else { return };
        // The far end has acknowledged this number, so it answers without regard to the window.
        let seq = sender.una().wrapping_sub(1);
        let mut packet = packet::empty_segment(&self.flow, seq, ack, u16::MAX);
        packet::complete(&mut packet, net.mtu, self.mss);
        // If there is no space, the next probe is soon enough.
        let _ = net.device.send(&packet);
    }

    fn poll_egress(&mut self, net: &mut Net<'_>, at: Instant) -> PollResult {
        if let Some(sender) = &self.sender {
            net.device.left_out = sender.not_lost();
        }
        let at = clock(net.epoch, at);
        let result = net.interface.poll_egress(at, net.device, &mut self.sockets);
        net.device.left_out.clear();
        self.note_sent(net);
        result
    }

    /// Tells [`Sender`] that smoltcp starts again at the first number that is not acknowledged.
    fn rewind(&mut self) {
        if let Some(sender) = &mut self.sender {
            sender.on_position(sender.una());
        }
    }

    /// Returns the next sequence number that is expected from the far end.
    fn expected(&mut self) -> u32 {
        let fin = matches!(
            self.state(),
            State::CloseWait | State::Closing | State::LastAck | State::TimeWait
        );
        self.first
            .wrapping_add(self.taken)
            .wrapping_add(self.socket().recv_queue() as u32)
            .wrapping_add(fin.into())
    }

    /// Passes the current window to smoltcp, if it differs from the last one.
    fn tell_window(&mut self, net: &mut Net<'_>) {
        let told = Some(self.window);
        if self.sender.as_ref().map(|sender| field(sender, self.scale)) != told {
            self.tell_acknowledgement(net);
        }
    }

    /// Passes an acknowledgement with the current window to smoltcp, as if it came from the far
    /// end.
    fn tell_acknowledgement(&mut self, net: &mut Net<'_>) {
        let expected = self.expected();
        let Some(sender) = &self.sender else { return };
        let field = field(sender, self.scale);
        self.window = field;
        let mut header = [0; 20];
        header[..2].copy_from_slice(&self.flow.remote.port().to_be_bytes());
        header[2..4].copy_from_slice(&self.flow.local.port().to_be_bytes());
        header[4..8].copy_from_slice(&expected.to_be_bytes());
        header[8..12].copy_from_slice(&sender.una().to_be_bytes());
        header[12] = 5 << 4;
        header[13] = tcp::ACK;
        set_window(&mut header, field);
        let mut packet = packet::inbound_header(&self.flow, PROTO_TCP, header.len());
        packet.extend(header);
        let range = 0..packet.len();
        net.device.inbox()[range.clone()].copy_from_slice(&packet);
        self.poll_ingress(net, range);
    }
}

/// Returns the window field for smoltcp.
fn field(sender: &Sender, scale: Option<u8>) -> u16 {
    let shift = scale.map_or(0, |_| sender::SCALE);
    u16::try_from(sender.allowed(1 << shift) >> shift).unwrap_or(u16::MAX)
}

fn set_window(segment: &mut [u8], window: u16) {
    segment[14..16].copy_from_slice(&window.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_sys::packet_pair::packet_pair;
    use smoltcp::iface::Config;
    use smoltcp::wire::{HardwareAddress, IpCidr};

    #[test]
    fn a_reset_is_sent_although_the_worker_is_behind() {
        let (worker, end) = packet_pair().unwrap();
        let mut device = Device::new(end, 1420);
        let flow = FlowKey {
            local: "10.9.0.1:4000".parse().unwrap(),
            remote: "10.9.0.2:53".parse().unwrap(),
        };
        let start = smoltcp::time::Instant::ZERO;
        let mut interface = Interface::new(Config::new(HardwareAddress::Ip), &mut device, start);
        interface.update_ip_addrs(|addresses| {
            let address = IpCidr::new(flow.local.ip().into(), 24);
            addresses.push(address).unwrap();
        });
        let mut inside = Inside::connect(&mut interface, flow, 4096).unwrap();
        let now = Instant::now();
        let mut net = Net {
            interface: &mut interface,
            device: &mut device,
            epoch: now,
            now,
            mtu: 1420,
        };
        inside.egress(&mut net);
        assert!(inside.syn.is_some());
        let filler = packet::empty_segment(&flow, 0, 0, 0);
        while !net.device.is_blocked() {
            net.device.send(&filler).unwrap();
        }
        inside.socket().abort();
        inside.egress_last(&mut net);
        let mut last = Vec::new();
        let mut buf = [0; 2048];
        loop {
            while let Ok(length) = nix::unistd::read(&worker, &mut buf) {
                last = buf[VNET_HDR_LEN + 20..length].to_vec();
            }
            if !net.device.is_blocked() {
                break;
            }
            net.device.flush();
        }
        assert_eq!(tcp::flags(&last) & tcp::RST, tcp::RST);
    }
}
