//! Shared by the targets: a tunnel, and a peer that knows its own keys and may violate the
//! protocol.
//!
//! Encryption would hide everything behind it from a fuzzer. The peer has a real session, so the
//! fuzzer's input arrives authenticated.
#![forbid(unsafe_code)]

use seikan_proto::batch::PacketBatch;
use seikan_proto::capabilities::{Capabilities, Cipher};
use seikan_proto::constants::MAX_HANDSHAKE_LEN;
use seikan_proto::cookie::CookieJar;
use seikan_proto::inbox::{Inbox, MAX_PIECES};
use seikan_proto::keys::{Identity, PresharedKey, PrivateKey};
use seikan_proto::mode::Mode;
use seikan_proto::noise::{Initiation, Initiator, Protocol};
use seikan_proto::outbox::Outbox;
use seikan_proto::rng::Rng;
use seikan_proto::session::Session;
use seikan_proto::tai64n::Tai64nClock;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::{Datagram, Now, Tunnel, TunnelConfig};
use seikan_wire::message::{RecordHeader, TAG_LEN};
use seikan_wire::{IpPacket, VNET_HDR_LEN, VnetHdr};
use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// A deterministic random number generator.
pub struct Counter(u64);

impl Counter {
    /// Returns the generator with this seed.
    pub fn new(seed: u64) -> Counter {
        Counter(seed)
    }
}

impl Rng for Counter {
    fn fill(&mut self, destination: &mut [u8]) {
        for chunk in destination.chunks_mut(8) {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (self.0 ^ self.0 >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            chunk.copy_from_slice(&mixed.to_le_bytes()[..chunk.len()]);
        }
    }
}

/// The tunnel under test and its only peer, with an established session.
pub struct Peer {
    /// The tunnel under test.
    pub tunnel: Tunnel,
    /// Protocol of the tunnel.
    pub protocol: Protocol,
    /// Current time.
    pub now: Now,
    session: Session,
    identity: Identity,
    jar: CookieJar,
    clock: Tai64nClock,
    rng: Counter,
    outbox: Outbox,
    inbox: Inbox,
    answers: Vec<Vec<u8>>,
    /// The latest datagrams that the tunnel sent, with their destinations.
    outgoing: VecDeque<(SocketAddr, Vec<u8>)>,
    work: Work,
    addresses: BTreeMap<SocketAddr, Address>,
}

/// Default address of the peer.
pub const SOURCE: SocketAddr =
    SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2)), 51820);

/// Bytes of UDP payload from and to an address.
#[derive(Clone, Copy, Debug, Default)]
struct Address {
    received: usize,
    sent: usize,
    /// The tunnel has accepted the address as the peer's.
    proven: bool,
}

/// Input of the tunnel, and its immediate output without timers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Received datagrams.
    pub datagrams_in: usize,
    /// Their bytes.
    pub bytes_in: usize,
    /// Datagrams sent in response.
    pub records_out: usize,
    /// Their bytes.
    pub bytes_out: usize,
    /// Examined frames and packets.
    pub looked_at: u64,
    /// Packets on the next link, including segments of super-packets.
    pub packets: u64,
    /// Their bytes.
    pub packet_bytes: u64,
    /// Writes to the TUN device.
    pub writes: usize,
}

impl Work {
    /// Fails if the output exceeds the limits for the received bytes.
    pub fn assert_bounded(&self, what: &str) {
        let bytes = self.bytes_in as u64;
        // One more initiation may be due.
        let due = MAX_HANDSHAKE_LEN;
        // The first answers have up to three parity records for a block.
        let parity = 3 * (1 + self.datagrams_in / 64);
        assert!(
            self.records_out <= self.datagrams_in + 1 + parity,
            "{what}: {self:?}"
        );
        assert!(
            self.bytes_out <= 3 * self.bytes_in + due,
            "{what}: {self:?}"
        );
        // Every frame but the last has three bytes, and a packet of its own also has a header: at
        // least that of Ethernet, 14 bytes.
        let frames = bytes / 3 + self.datagrams_in as u64;
        assert!(self.looked_at <= frames, "{what}: {self:?}");
        assert!(self.packets * 17 <= bytes, "{what}: {self:?}");
        assert!(self.writes as u64 <= self.packets, "{what}: {self:?}");
        // Segments repeat headers of at most 128 bytes every 256 bytes.
        assert!(self.packet_bytes <= 2 * bytes, "{what}: {self:?}");
    }
}

/// The peer's only inner addresses.
const ALLOWED: [IpAddr; 2] = [
    IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)),
    IpAddr::V6(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2)),
];

impl Peer {
    /// Creates a tunnel that has completed a handshake with its peer.
    pub fn new(protocol: Protocol, mode: Mode) -> Peer {
        let mut rng = Counter(1);
        let [theirs, ours] = [(); 2].map(|()| PrivateKey::generate(&mut rng));
        let identity = Identity::new(ours);
        let jar = CookieJar::new(protocol, &theirs.public());
        let mut tunnel = Tunnel::new(TunnelConfig {
            protocol,
            mode,
            private_key: theirs,
            inner_mtu: 1420,
            offload: true,
            ciphers: vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305],
            copy_dscp: false,
            repair: (protocol == Protocol::Native).then_some(10),
            rng: Box::new(Counter(2)),
        });
        let id = tunnel
            .add_peer(*identity.public())
            .expect("two different keys");
        for address in ALLOWED {
            tunnel.add_allowed_ip(id, address.into());
        }
        let now = Now {
            mono: Instant::from_nanos(1 << 40),
            wall: Duration::from_secs(1_800_000_000),
        };
        let capabilities = Capabilities {
            version: 1,
            ciphers: vec![Cipher::Aes256Gcm],
            max_lanes: 1,
            inner_mtu: 1420,
            // Offload and loss repair.
            features: 3,
            mode,
        };
        let (payload, cipher) = match protocol {
            Protocol::WireGuard => (vec![], Cipher::ChaCha20Poly1305),
            Protocol::Native => (capabilities.encode(), Cipher::Aes256Gcm),
        };
        let mut clock = Tai64nClock::default();
        let mut message = vec![0; 2048];
        let (mut initiator, length) = initiation(
            protocol,
            &identity,
            &tunnel,
            &mut clock,
            now,
            &payload,
            &mut rng,
            &mut message,
        );
        message.truncate(length);
        let mut outbox = Outbox::new(1 << 20);
        let mut inbox = Inbox::new(true, true);
        tunnel.inbound(
            now,
            [datagram(0..length, length, 0)].into_iter(),
            &mut message,
            &mut inbox,
            &mut outbox,
        );
        let response = outbox.bytes(&outbox.runs()[0]).to_vec();
        let keys = initiator
            .consume_response(&response)
            .expect("a true response");
        for run in outbox.runs() {
            tunnel.sent(run, Ok(()));
        }
        outbox.clear();
        let session = Session::new(&keys, cipher, true, now.mono);
        Peer {
            tunnel,
            protocol,
            now,
            session,
            identity,
            jar,
            clock,
            rng,
            outbox,
            inbox,
            answers: vec![],
            outgoing: VecDeque::new(),
            work: Work::default(),
            addresses: BTreeMap::from([(
                SOURCE,
                Address {
                    received: length,
                    sent: response.len(),
                    proven: false,
                },
            )]),
        }
    }

    /// Seals a plaintext and delivers it.
    pub fn deliver_record(&mut self, plaintext: &[u8]) {
        let message = self.seal(plaintext);
        self.deliver_from(SOURCE, message);
    }

    /// Delivers one datagram from any address.
    pub fn deliver_from(&mut self, source: SocketAddr, bytes: Vec<u8>) {
        let size = bytes.len().max(1);
        self.deliver_batch(source, bytes, size, 0);
    }

    /// Passes the tunnel a UDP packet for the peer, with this many bytes of payload.
    pub fn read_from_device(&mut self, payload: usize) {
        let mut read = vec![0; VNET_HDR_LEN + 28 + payload];
        let packet = &mut read[VNET_HDR_LEN..];
        packet[0] = 0x45;
        packet[2..4].copy_from_slice(&((28 + payload) as u16).to_be_bytes());
        (packet[8], packet[9]) = (64, 17);
        packet[12..16].copy_from_slice(&[10, 0, 0, 1]);
        packet[16..20].copy_from_slice(&[10, 0, 0, 2]);
        packet[24..26].copy_from_slice(&((8 + payload) as u16).to_be_bytes());
        let mut batch = PacketBatch::new(4 << 16, 4);
        batch.space().expect("room for one")[..read.len()].copy_from_slice(&read);
        batch.commit(read.len());
        self.tunnel
            .outbound(self.now, &mut batch, &mut self.outbox, &mut self.inbox);
        self.flush(&[]);
    }

    /// A user at the tunnel's host probes the peer.
    pub fn ask_whether_it_answers(&mut self) {
        let id = self.tunnel.peers().next().expect("the peer").id;
        self.tunnel.ping(self.now, id, &mut self.outbox);
        self.flush(&[]);
    }

    /// Answers the path checks among the latest datagrams to an address, from that address.
    pub fn answer_probes(&mut self, at: SocketAddr) {
        let outgoing = std::mem::take(&mut self.outgoing);
        for (to, mut datagram) in outgoing.into_iter().filter(|(to, _)| *to == at) {
            let Some(header) = RecordHeader::read(&datagram) else {
                continue;
            };
            let size = datagram.len() as u16;
            let counter = self.session.whole_counter(header.counter);
            let sealed = &mut datagram[self.protocol.data_header_len()..];
            let Ok(length) = self.session.open(counter, sealed) else {
                continue;
            };
            if let [_, _, _, 5, 2, 0, a, b, ..] = sealed[..length] {
                let [c, d] = size.to_le_bytes();
                let answer = self.seal(&[0, 0, 0, 6, 4, 0, a, b, c, d]);
                self.deliver_from(to, answer);
            }
        }
    }

    /// Returns the bytes of UDP payload sent to an address.
    pub fn sent_to(&self, address: SocketAddr) -> usize {
        self.addresses.get(&address).map_or(0, |a| a.sent)
    }

    /// Takes the counters since the last call.
    pub fn take_work(&mut self) -> Work {
        std::mem::take(&mut self.work)
    }

    /// An unvalidated address receives at most three times the bytes that came from it.
    pub fn assert_nobody_is_flooded(&self) {
        for (
            address,
            Address {
                received,
                sent,
                proven,
            },
        ) in &self.addresses
        {
            assert!(
                *proven || *sent <= 3 * received,
                "{sent} bytes to {address} for {received}"
            );
        }
    }

    /// Seals `plaintext` under the session.
    pub fn seal(&mut self, plaintext: &[u8]) -> Vec<u8> {
        let header = self.protocol.data_header_len();
        let mut message = vec![0; header + plaintext.len() + TAG_LEN];
        message[header..][..plaintext.len()].copy_from_slice(plaintext);
        self.session.seal(self.protocol, &mut message);
        message
    }

    /// Returns an initiation with any payload that the protocol allows.
    pub fn initiate(&mut self, payload: &[u8]) -> Vec<u8> {
        let payload = &payload[..payload.len().min(self.protocol.max_payload())];
        let mut message = vec![0; 2048];
        let (_, length) = initiation(
            self.protocol,
            &self.identity,
            &self.tunnel,
            &mut self.clock,
            self.now,
            payload,
            &mut self.rng,
            &mut message,
        );
        message.truncate(length);
        self.jar.stamp(&mut message, self.now.mono);
        message
    }

    /// Completes another handshake with this payload. The next record confirms its session.
    pub fn renew(&mut self, payload: &[u8]) {
        let mut message = vec![0; 2048];
        let (mut initiator, length) = initiation(
            self.protocol,
            &self.identity,
            &self.tunnel,
            &mut self.clock,
            self.now,
            payload,
            &mut self.rng,
            &mut message,
        );
        message.truncate(length);
        self.jar.stamp(&mut message, self.now.mono);
        self.deliver_from(SOURCE, message);
        let response = self.last_answer().expect("a response");
        let keys = initiator
            .consume_response(response)
            .expect("a true response");
        self.session = Session::new(&keys, self.session.cipher, true, self.now.mono);
    }

    /// Delivers the result of one receive call, and checks all output.
    pub fn deliver(&mut self, bytes: Vec<u8>, segment_size: usize, traffic_class: u8) {
        self.deliver_batch(SOURCE, bytes, segment_size, traffic_class);
    }

    /// As [`Self::deliver`], from any address.
    pub fn deliver_batch(
        &mut self,
        source: SocketAddr,
        mut bytes: Vec<u8>,
        segment_size: usize,
        traffic_class: u8,
    ) {
        let whole = Datagram {
            source,
            ..datagram(0..bytes.len(), segment_size, traffic_class)
        };
        self.addresses.entry(source).or_default().received += bytes.len();
        self.work.datagrams_in += bytes.len().div_ceil(segment_size.max(1)).max(1);
        self.work.bytes_in += bytes.len();
        let before = self.tunnel.totals().inbound.packets_in;
        self.tunnel.inbound(
            self.now,
            [whole].into_iter(),
            &mut bytes,
            &mut self.inbox,
            &mut self.outbox,
        );
        // A slice counts as several packets.
        let slices: u64 = self.inbox.writes().iter().map(|w| w.packets - 1).sum();
        let looked_at = self.tunnel.totals().inbound.packets_in - before;
        self.work.looked_at += looked_at.saturating_sub(slices);
        for run in self.outbox.runs() {
            self.work.records_out += run.segments;
            self.work.bytes_out += run.range.len();
        }
        for write in self.inbox.writes() {
            self.work.packets += write.packets.max(1);
            self.work.packet_bytes += write.bytes;
            self.work.writes += 1;
        }
        self.flush(&bytes);
        self.release();
    }

    /// Processes what loss repair restored or held back, and counts it.
    fn release(&mut self) {
        let mut arena = vec![0; 140_000];
        loop {
            let more = self
                .tunnel
                .release(self.now, &mut arena, &mut self.inbox, &mut self.outbox);
            for write in self.inbox.writes() {
                self.work.packets += write.packets.max(1);
                self.work.packet_bytes += write.bytes;
                self.work.writes += 1;
            }
            self.flush(&arena);
            if !more {
                return;
            }
        }
    }

    /// Advances the time.
    pub fn wait(&mut self, time: Duration) {
        self.now.mono += time;
        self.now.wall += time;
        while self
            .tunnel
            .poll(self.now, &mut self.outbox, &mut self.inbox)
        {
            self.flush(&[]);
        }
        self.flush(&[]);
        self.release();
    }

    /// Returns the latest datagram that the tunnel sent.
    pub fn last_answer(&self) -> Option<&[u8]> {
        self.answers.last().map(Vec::as_slice)
    }

    /// Every packet is forwarded, consumed, or dropped with a reason.
    pub fn assert_ledger_closes(&self) {
        let totals = self.tunnel.totals();
        assert_eq!(totals.inbound.unaccounted(), 0, "{:?}", totals.inbound);
        assert_eq!(totals.outbound.unaccounted(), 0, "{:?}", totals.outbound);
    }

    fn flush(&mut self, arena: &[u8]) {
        for peer in self.tunnel.peers() {
            if let Some(endpoint) = peer.path.endpoint.filter(|_| peer.path.is_validated()) {
                self.addresses.entry(endpoint).or_default().proven = true;
            }
        }
        for run in self.outbox.runs() {
            let (to, bytes) = (run.destination.address, self.outbox.bytes(run));
            self.addresses.entry(to).or_default().sent += bytes.len();
            self.answers = vec![bytes.to_vec()];
            for datagram in bytes.chunks(run.segment_size) {
                self.outgoing.push_back((to, datagram.to_vec()));
            }
            let most = self.outgoing.len().saturating_sub(64);
            self.outgoing.drain(..most);
            self.tunnel.sent(run, Ok(()));
        }
        self.outbox.clear();
        for write in self.inbox.writes() {
            let mut parts = [IoSlice::new(&[]); MAX_PIECES + 2];
            let count = write.parts(arena, &mut parts);
            let bytes: Vec<u8> = parts[..count]
                .iter()
                .flat_map(|part| part.to_vec())
                .collect();
            check_write(&bytes, self.tunnel.mode());
            self.tunnel.delivered(write, Ok(()));
        }
        self.inbox.clear();
    }
}

/// Checks a write to the TUN or TAP device: a header that the kernel accepts, and a packet from an
/// address of the peer, or a frame without IP.
fn check_write(bytes: &[u8], mode: Mode) {
    let header = VnetHdr::read(bytes).expect("a virtio-net header");
    let packet = &bytes[VNET_HDR_LEN..];
    if let Some(ip_at) = mode.ip_at(packet).expect("an Ethernet header") {
        let packet = &packet[ip_at..];
        let ip = IpPacket::parse(packet).expect("an IP packet");
        assert_eq!(
            ip.total_len,
            packet.len(),
            "the packet and nothing behind it"
        );
        assert!(ALLOWED.contains(&ip.src), "{} is not the peer's", ip.src);
    } else {
        assert_eq!(header, VnetHdr::default(), "nothing to do for the kernel");
    }
    // virtio_net_hdr_to_skb, include/linux/virtio_net.h
    if header.needs_csum {
        let at = usize::from(header.csum_start) + usize::from(header.csum_offset) + 2;
        assert!(at <= packet.len(), "checksum at {at} of {}", packet.len());
    }
    if header.gso_type != seikan_wire::GsoType::None {
        assert!(header.gso_size > 0 && header.needs_csum, "{header:?}");
    }
}

#[allow(clippy::too_many_arguments, reason = "the parts of an initiation")]
fn initiation(
    protocol: Protocol,
    identity: &Identity,
    tunnel: &Tunnel,
    clock: &mut Tai64nClock,
    now: Now,
    payload: &[u8],
    rng: &mut Counter,
    out: &mut [u8],
) -> (Initiator, usize) {
    let remote = tunnel.identity().public();
    let none = PresharedKey::default();
    Initiation {
        protocol,
        identity,
        remote,
        psk: &none,
        sender_index: 7,
        timestamp: clock.stamp(now.wall),
        payload,
    }
    .write(rng, out)
    .expect("room for an initiation")
}

fn datagram(range: std::ops::Range<usize>, segment_size: usize, traffic_class: u8) -> Datagram {
    Datagram {
        source: SOURCE,
        destination: None,
        traffic_class,
        range,
        segment_size,
        truncated: false,
    }
}
