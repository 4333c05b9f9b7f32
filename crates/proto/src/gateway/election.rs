//! The election of the active gateway among two on one local network. Without I/O.
//!
//! Both have the same identity and configuration, so the active one looks the same to devices (one
//! responder address) and to remotes (one static key, which roams). Each sends an [`Advert`] four
//! times a second. A standby gateway becomes active when it has received nothing from an active one
//! for a second, or at once when that one leaves. An active gateway yields only to an active one of
//! higher rank, for example after a partition of the local network, and when its own interface has
//! no carrier.
//!
//! Adverts are authenticated with a key that only holders of the identity know. Replays are
//! rejected too: each advert carries a fresh random number and echoes the last number received from
//! the other side. An advert that echoes none of the latest numbers is ignored. The clocks need not
//! agree.

use crate::keys::PrivateKey;
use crate::rng::Rng;
use crate::time::Instant;
use blake2::digest::consts::U16;
use blake2::digest::{Digest, FixedOutput, KeyInit, Mac as _, Update};
use blake2::{Blake2s256, Blake2sMac};
use seikan_wire::ethernet::{Ethernet, Mac};
use std::time::Duration;
use zeroize::Zeroizing;

/// EtherType of adverts: "local experimental" (IEEE 802, 9.2.4).
pub const ETHERTYPE_ADVERT: u16 = 0x88b5;

/// Interval between two adverts.
const INTERVAL: Duration = Duration::from_millis(250);
/// Silence after which an active gateway counts as dead.
const DEAD: Duration = Duration::from_millis(1_000);
/// Time that a gateway listens before it may become active.
const LISTEN: Duration = Duration::from_millis(1_500);
/// Number of own numbers that an advert may echo: enough for one or two lost ones.
const RECENT: usize = 8;

/// Version of the format.
const VERSION: u8 = 1;
/// Version, role, priority, reserved, instance, number, echo, MAC.
const ADVERT_LEN: usize = 4 + 3 * 8 + MAC_LEN;
const MAC_LEN: usize = 16;

/// The state of a gateway, as advertised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Standby = 0,
    Active = 1,
    Leaving = 2,
}

/// A message from one gateway to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Advert {
    role: Role,
    priority: u8,
    /// Chosen at random when the gateway starts.
    instance: u64,
    number: u64,
    /// The last number received from the other gateway.
    echo: u64,
}

/// The other gateway.
#[derive(Clone, Copy, Debug)]
struct Other {
    rank: (u8, u64),
    role: Role,
    last_received: Instant,
}

/// State of the election at one gateway.
pub struct Election {
    key: Zeroizing<[u8; 32]>,
    priority: u8,
    instance: u64,
    active: bool,
    /// The gateway does not become active before this time.
    listen_until: Instant,
    next_advert: Instant,
    recent: [u64; RECENT],
    sent: usize,
    /// The last number received, and the other gateway.
    received_number: u64,
    other: Option<Other>,
    /// Whether the interface has a carrier.
    connected: bool,
}

impl std::fmt::Debug for Election {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Election")
            .field("active", &self.active)
            .field("other", &self.other)
            .finish_non_exhaustive()
    }
}

impl Election {
    /// Starts to listen. `priority` is 1 to 254.
    pub fn new(identity: &PrivateKey, priority: u8, rng: &mut dyn Rng, now: Instant) -> Election {
        let mut hash = Blake2s256::new();
        Update::update(&mut hash, b"seikan gateway election");
        Update::update(&mut hash, identity.as_bytes());
        let mut instance = [0; 8];
        rng.fill(&mut instance);
        Election {
            key: Zeroizing::new(hash.finalize_fixed().into()),
            priority,
            instance: u64::from_be_bytes(instance),
            active: false,
            listen_until: now + LISTEN,
            next_advert: now,
            recent: [0; RECENT],
            sent: 0,
            received_number: 0,
            other: None,
            connected: true,
        }
    }

    /// Whether this gateway is active.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Whether the other gateway is active; `None` if nothing was received from it within the last
    /// second.
    pub fn other(&self, now: Instant) -> Option<bool> {
        let other = self
            .other
            .filter(|o| !o.last_received.has_expired(DEAD, now))?;
        Some(other.role == Role::Active)
    }

    /// The carrier of the interface has changed.
    pub fn set_connected(&mut self, connected: bool, now: Instant) {
        if connected && !self.connected {
            self.listen_until = now + LISTEN;
        }
        self.connected = connected;
        if !connected {
            self.active = false;
        }
    }

    /// When [`Self::poll`] has work to do.
    pub fn next_wakeup(&self) -> Instant {
        self.next_advert
    }

    /// Updates the state and returns the advert that is due: a whole frame from `mac`.
    pub fn poll(&mut self, now: Instant, mac: Mac, rng: &mut dyn Rng) -> Option<Vec<u8>> {
        if now < self.next_advert {
            return None;
        }
        self.next_advert = now + INTERVAL;
        self.decide(now);
        let role = if self.active {
            Role::Active
        } else {
            Role::Standby
        };
        Some(self.advert(role, mac, rng))
    }

    /// The last advert of a gateway that shuts down.
    pub fn leave(&mut self, mac: Mac, rng: &mut dyn Rng) -> Vec<u8> {
        self.active = false;
        self.advert(Role::Leaving, mac, rng)
    }

    /// Handles the payload of a frame with [`ETHERTYPE_ADVERT`]. Returns false if it is not valid.
    pub fn receive(&mut self, now: Instant, payload: &[u8]) -> bool {
        let Some(advert) = self.read(payload) else {
            return false;
        };
        if advert.instance == self.instance {
            return false; // our own, reflected
        }
        let fresh = advert.echo != 0 && self.recent.contains(&advert.echo);
        // Echoed in the next advert, so that the answer to that one is accepted. Two gateways in
        // contact are not disturbed by replays.
        if fresh || self.other(now).is_none() {
            self.received_number = advert.number;
        }
        if !fresh {
            return false;
        }
        self.other = Some(Other {
            rank: (advert.priority, advert.instance),
            role: advert.role,
            last_received: now,
        });
        self.decide(now);
        true
    }

    fn decide(&mut self, now: Instant) {
        if !self.connected {
            self.active = false;
            return;
        }
        let other = self
            .other
            .filter(|o| !o.last_received.has_expired(DEAD, now));
        let outranked = other.is_some_and(|o| o.rank > (self.priority, self.instance));
        self.active = match other.map(|o| o.role) {
            Some(Role::Active) => self.active && !outranked,
            Some(Role::Leaving) => true,
            Some(Role::Standby) => self.active || (now >= self.listen_until && !outranked),
            None => self.active || now >= self.listen_until,
        };
    }

    fn advert(&mut self, role: Role, mac: Mac, rng: &mut dyn Rng) -> Vec<u8> {
        let mut number = [0; 8];
        rng.fill(&mut number);
        // Zero means that nothing was received.
        let number = u64::from_be_bytes(number).max(1);
        self.recent[self.sent % RECENT] = number;
        self.sent += 1;
        let mut frame = vec![0; seikan_wire::ethernet::HEADER_LEN];
        Ethernet::new(GROUP, mac, None, ETHERTYPE_ADVERT).write(&mut frame);
        let start = frame.len();
        frame.extend([VERSION, role as u8, self.priority, 0]);
        for value in [self.instance, number, self.received_number] {
            frame.extend(value.to_be_bytes());
        }
        let mac = self.mac(&frame[start..]);
        frame.extend(mac.finalize_fixed());
        frame
    }

    fn read(&self, payload: &[u8]) -> Option<Advert> {
        // Ethernet pads short frames.
        let (body, mac) = payload.get(..ADVERT_LEN)?.split_at(ADVERT_LEN - MAC_LEN);
        self.mac(body).verify_slice(mac).ok()?;
        let number = |at: usize| Some(u64::from_be_bytes(*body.get(at..)?.first_chunk()?));
        let role = match body[1] {
            0 => Role::Standby,
            1 => Role::Active,
            2 => Role::Leaving,
            _ => return None,
        };
        (body[0] == VERSION).then_some(Advert {
            role,
            priority: body[2],
            instance: number(4)?,
            number: number(12)?,
            echo: number(20)?,
        })
    }

    fn mac(&self, body: &[u8]) -> Blake2sMac<U16> {
        // BLAKE2s accepts a key of 32 bytes.
        let mut mac =
            <Blake2sMac<U16> as KeyInit>::new_from_slice(&self.key[..]).expect("32 bytes");
        Update::update(&mut mac, body);
        mac
    }
}

/// Destination of adverts: a locally administered group that bridges forward.
pub const GROUP: Mac = Mac([0x03, 0x53, 0x65, 0x69, 0x6b, 0x61]);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// A linear congruential generator (Knuth's MMIX): long enough not to repeat itself here.
    struct Counting(u64);

    impl Rng for Counting {
        fn fill(&mut self, destination: &mut [u8]) {
            for byte in destination {
                self.0 = self
                    .0
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                *byte = (self.0 >> 56) as u8;
            }
        }
    }

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(1 << 40) + Duration::from_millis(ms)
    }

    fn key(byte: u8) -> PrivateKey {
        PrivateKey::from_bytes([byte; 32])
    }

    /// Gateways on one wire, polled every ten milliseconds; those that are `None` are dead.
    struct Lan {
        gateways: Vec<Option<(Election, Counting)>>,
        ms: u64,
        /// How often two were active at once.
        both: u32,
        /// All frames sent.
        frames: Vec<Vec<u8>>,
    }

    impl Lan {
        fn new(priorities: &[u8]) -> Lan {
            let mut lan = Lan {
                gateways: Vec::new(),
                ms: 0,
                both: 0,
                frames: Vec::new(),
            };
            for priority in priorities {
                lan.join(*priority);
            }
            lan
        }

        fn join(&mut self, priority: u8) {
            let mut rng = Counting(u64::from(priority) << 8 | self.gateways.len() as u64);
            let election = Election::new(&key(7), priority, &mut rng, at(self.ms));
            self.gateways.push(Some((election, rng)));
        }

        fn spread(&mut self, from: usize, frame: &[u8]) {
            self.frames.push(frame.to_vec());
            for (i, gateway) in self.gateways.iter_mut().enumerate() {
                if let Some((election, _)) = gateway
                    && i != from
                {
                    election.receive(at(self.ms), &frame[14..]);
                }
            }
        }

        fn run(&mut self, ms: u64) {
            let end = self.ms + ms;
            while self.ms < end {
                self.ms += 10;
                for i in 0..self.gateways.len() {
                    let now = at(self.ms);
                    let frame = self.gateways[i]
                        .as_mut()
                        .and_then(|(election, rng)| election.poll(now, MAC, rng));
                    if let Some(frame) = frame {
                        self.spread(i, &frame);
                    }
                }
                self.both += u32::from(self.active().len() > 1);
            }
        }

        fn active(&self) -> Vec<usize> {
            let active = |g: &Option<(Election, Counting)>| {
                g.as_ref().is_some_and(|(election, _)| election.is_active())
            };
            (0..self.gateways.len())
                .filter(|i| active(&self.gateways[*i]))
                .collect()
        }
    }

    #[test]
    fn one_alone_is_active_once_it_has_listened() {
        let mut lan = Lan::new(&[100]);
        lan.run(1_400);
        assert!(lan.active().is_empty());
        lan.run(400);
        assert_eq!(lan.active(), [0]);
    }

    #[test]
    fn the_higher_of_two_starting_gateways_is_active() {
        for (priorities, winner) in [([100, 50], 0), ([50, 100], 1)] {
            let mut lan = Lan::new(&priorities);
            lan.run(10_000);
            assert_eq!(lan.active(), [winner]);
            assert_eq!(lan.both, 0);
        }
    }

    #[test]
    fn the_other_takes_over_in_time_and_keeps_it() {
        let mut lan = Lan::new(&[100, 50]);
        lan.run(5_000);
        lan.gateways[0] = None;
        lan.run(1_500);
        assert_eq!(lan.active(), [1]);
        // A gateway of higher rank that comes back does not disturb it.
        lan.join(200);
        lan.run(10_000);
        assert_eq!(lan.active(), [1]);
        assert_eq!(lan.both, 0);
    }

    #[test]
    fn a_leaving_gateway_is_replaced_at_once() {
        let mut lan = Lan::new(&[100, 50]);
        lan.run(5_000);
        let (mut leaving, mut rng) = lan.gateways[0].take().unwrap();
        let frame = leaving.leave(MAC, &mut rng);
        lan.spread(0, &frame);
        assert_eq!(lan.active(), [1]);
    }

    #[test]
    fn a_gateway_without_a_carrier_yields() {
        let mut lan = Lan::new(&[100]);
        lan.run(5_000);
        let now = at(lan.ms);
        let (election, _) = lan.gateways[0].as_mut().unwrap();
        election.set_connected(false, now);
        assert!(!election.is_active());
        lan.run(5_000);
        assert!(lan.active().is_empty());
    }

    #[test]
    fn two_active_gateways_in_contact_become_one() {
        let mut halves = [Lan::new(&[50]), Lan::new(&[100])];
        halves.iter_mut().for_each(|half| half.run(5_000));
        let [mut one, two] = halves;
        let (election, _) = two.gateways.into_iter().next().flatten().unwrap();
        one.gateways.push(Some((election, Counting(200))));
        one.run(1_000);
        assert_eq!(one.active(), [1]);
    }

    #[test]
    fn adverts_of_others_are_ignored() {
        let mut lan = Lan::new(&[100]);
        let mut rng = Counting(99);
        let mut other_key = Election::new(&key(8), 254, &mut rng, at(0));
        lan.run(1_000);
        let frame = other_key.leave(MAC, &mut rng);
        let (election, _) = lan.gateways[0].as_mut().unwrap();
        assert!(!election.receive(at(1_000), &frame[14..]));
        assert!(!election.receive(at(1_000), &[]));
        // Old adverts are not accepted again.
        let mut lan = Lan::new(&[100, 50]);
        lan.run(5_000);
        let old = lan.frames.clone();
        lan.run(5_000);
        let now = at(lan.ms);
        let (standby, _) = lan.gateways[1].as_mut().unwrap();
        assert!(old.iter().all(|frame| !standby.receive(now, &frame[14..])));
    }
}
