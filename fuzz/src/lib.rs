//! What the targets share: a tunnel, and a peer of it that knows its own keys and keeps no rule.
//!
//! Encryption would hide everything behind it from a fuzzer. The peer holds a true session, so that
//! what the fuzzer makes up arrives authentic.
#![forbid(unsafe_code)]

use seikan_proto::capabilities::{Capabilities, Cipher};
use seikan_proto::cookie::CookieJar;
use seikan_proto::inbox::{Inbox, MAX_PIECES};
use seikan_proto::keys::{Identity, PresharedKey, PrivateKey};
use seikan_proto::noise::{Construction, Initiator, create_initiation};
use seikan_proto::outbox::Outbox;
use seikan_proto::rng::Rng;
use seikan_proto::session::Session;
use seikan_proto::tai64n::Tai64nClock;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::{Datagram, Now, Tunnel, TunnelConfig};
use seikan_wire::message::{DATA_HEADER_LEN, TAG_LEN};
use seikan_wire::{IpPacket, VNET_HDR_LEN, VnetHdr};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// A source that repeats itself with every run.
pub struct Counter(u64);

impl Counter {
    /// The source that starts with `seed`.
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

/// The tunnel under test and its one peer, with an established session.
pub struct Peer {
    /// Under test.
    pub tunnel: Tunnel,
    /// Which protocol.
    pub construction: Construction,
    /// The time.
    pub now: Now,
    session: Session,
    identity: Identity,
    jar: CookieJar,
    clock: Tai64nClock,
    rng: Counter,
    outbox: Outbox,
    inbox: Inbox,
    answers: Vec<Vec<u8>>,
}

/// The peer's only inner addresses.
const ALLOWED: [IpAddr; 2] = [
    IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)),
    IpAddr::V6(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2)),
];

impl Peer {
    /// A tunnel that has completed a handshake with its peer.
    pub fn new(construction: Construction) -> Peer {
        let mut rng = Counter(1);
        let [theirs, ours] = [(); 2].map(|()| PrivateKey::generate(&mut rng));
        let identity = Identity::new(ours);
        let jar = CookieJar::new(construction, &theirs.public());
        let mut tunnel = Tunnel::new(TunnelConfig {
            construction,
            private_key: theirs,
            inner_mtu: 1420,
            offload: true,
            ciphers: vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305],
            copy_dscp: false,
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
            features: 1,
        };
        let (payload, cipher) = match construction {
            Construction::WireGuard => (vec![], Cipher::ChaCha20Poly1305),
            Construction::Native => (capabilities.encode(), Cipher::Aes256Gcm),
        };
        let mut clock = Tai64nClock::default();
        let mut message = vec![0; 2048];
        let (mut initiator, length) = initiation(
            construction,
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
            construction,
            now,
            session,
            identity,
            jar,
            clock,
            rng,
            outbox,
            inbox,
            answers: vec![],
        }
    }

    /// Seals `plaintext` under the session.
    pub fn seal(&mut self, plaintext: &[u8]) -> Vec<u8> {
        let mut message = vec![0; DATA_HEADER_LEN + plaintext.len() + TAG_LEN];
        message[DATA_HEADER_LEN..][..plaintext.len()].copy_from_slice(plaintext);
        self.session
            .seal(self.construction.data_type(), &mut message);
        message
    }

    /// An initiation with any payload that the construction has room for.
    pub fn initiate(&mut self, payload: &[u8]) -> Vec<u8> {
        let payload = &payload[..payload.len().min(self.construction.max_payload())];
        let mut message = vec![0; 2048];
        let (_, length) = initiation(
            self.construction,
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

    /// Hands the tunnel what one receive call returned, and checks all that comes out.
    pub fn deliver(&mut self, mut bytes: Vec<u8>, segment_size: usize, traffic_class: u8) {
        let whole = datagram(0..bytes.len(), segment_size, traffic_class);
        self.tunnel.inbound(
            self.now,
            [whole].into_iter(),
            &mut bytes,
            &mut self.inbox,
            &mut self.outbox,
        );
        self.flush(&bytes);
    }

    /// Lets time pass.
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
    }

    /// The last datagram that the tunnel sent.
    pub fn last_answer(&self) -> Option<&[u8]> {
        self.answers.last().map(Vec::as_slice)
    }

    /// Every packet in is out, consumed, or dropped for a reason.
    pub fn assert_ledger_closes(&self) {
        let totals = self.tunnel.totals();
        assert_eq!(totals.inbound.unaccounted(), 0, "{:?}", totals.inbound);
        assert_eq!(totals.outbound.unaccounted(), 0, "{:?}", totals.outbound);
    }

    fn flush(&mut self, arena: &[u8]) {
        for run in self.outbox.runs() {
            self.answers = vec![self.outbox.bytes(run).to_vec()];
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
            check_write(&bytes);
            self.tunnel.delivered(write, Ok(()));
        }
        self.inbox.clear();
    }
}

/// What the TUN device is given: a header that the kernel takes, and a packet from an address that is the peer's.
fn check_write(bytes: &[u8]) {
    let header = VnetHdr::read(bytes).expect("a virtio-net header");
    let packet = &bytes[VNET_HDR_LEN..];
    let ip = IpPacket::parse(packet).expect("an IP packet");
    assert_eq!(
        ip.total_len,
        packet.len(),
        "the packet and nothing behind it"
    );
    assert!(ALLOWED.contains(&ip.src), "{} is not the peer's", ip.src);
    // virtio_net_hdr_to_skb, include/linux/virtio_net.h
    if header.needs_csum {
        let at = usize::from(header.csum_start) + usize::from(header.csum_offset) + 2;
        assert!(at <= packet.len(), "checksum at {at} of {}", packet.len());
    }
    if header.gso_type != seikan_wire::GsoType::None {
        assert!(header.gso_size > 0 && header.needs_csum, "{header:?}");
    }
}

#[allow(clippy::too_many_arguments, reason = "what an initiation is made of")]
fn initiation(
    construction: Construction,
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
    create_initiation(
        construction,
        identity,
        remote,
        &none,
        7,
        clock.stamp(now.wall),
        payload,
        rng,
        out,
    )
    .expect("room for an initiation")
}

fn datagram(range: std::ops::Range<usize>, segment_size: usize, traffic_class: u8) -> Datagram {
    Datagram {
        source: SocketAddr::from(([192, 0, 2, 2], 51820)),
        destination: None,
        traffic_class,
        range,
        segment_size,
        truncated: false,
    }
}
