//! What members of a mesh and their coordinator tell each other: pure types, each with its bounds.
//!
//! A coordinator knows who belongs to a mesh; members ask it, and keep what they were told. It is
//! spoken to in JSON over HTTPS, paths under [`BASE`]:
//!
//! | | who | sends | gets |
//! |---|---|---|---|
//! | `POST /v1/join` | a host with a [`Token`] | [`JoinRequest`] | [`Joined`] |
//! | `GET /v1/changes?since=R&sight=R&epoch=E&wait=S` | a member | | [`Changes`] after its [`Cursor`], waited for S seconds at most |
//! | `POST /v1/endpoints` | a member | [`Endpoints`] | nothing |
//! | `POST /v1/call` | a member that wants to reach another | [`Call`] | nothing; the other hears of it in its next [`Changes`] |
//! | `POST /v1/key` | a member that has another key | [`Rotation`] | nothing; the others hear of a member with the same name and addresses |
//! | `POST /v1/leave` | a member | | nothing |
//!
//! A member shows its [`Credential`] as a bearer token (RFC 6750). What is refused comes with a
//! [`Refusal`]. At the same port of UDP a coordinator answers STUN binding requests (RFC 8489).
//! What members say to a relay is in [`relay`], and by a stream in the frames of [`framing`]. Private keys are in none of these messages: they never leave their host.

mod address;
pub mod framing;
mod membership;
mod name;
mod pin;
pub mod policy;
pub mod relay;
mod secret;
mod ticket;

pub use address::{HOSTS, NetworkError, Networks};
pub use membership::{Change, MAX_KNOWN, Membership};
pub use name::{Name, NameError};
pub use pin::{Pin, PinError};
pub use policy::{Access, Party, Policy};
pub use secret::{Credential, Digest, SecretError, Token};
pub use ticket::{
    MAX_RELAYS, Relay, RelayAddress, RelayAddressError, RelayKind, RelayPassword, RelaySecret,
    RelaySecretError, RelayTls, Ticket, in_turn,
};

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::keys::PublicKey;

/// What every path starts with: the version of these messages.
pub const BASE: &str = "/v1";
/// Endpoints of one member, at most.
pub const MAX_ENDPOINTS: usize = 16;
/// Relayed addresses of one member, at most.
pub const MAX_RELAYED: usize = 4;
/// Virtual addresses of one member, at most.
pub const MAX_ADDRESSES: usize = 4;
/// Callers that one answer tells of, at most.
pub const MAX_CALLS: usize = 64;
/// Coordinators that members are told of, at most.
pub const MAX_COORDINATORS: usize = 8;
/// Tags of one member, at most.
pub const MAX_TAGS: usize = 16;
/// Bytes of a request's body, at most.
pub const MAX_REQUEST: usize = 16 << 10;
/// Bytes of an answer's body, at most: [`HOSTS`] members are told in parts.
pub const MAX_ANSWER: usize = 8 << 20;
/// Members in one answer, at most; more are told in the next.
pub const MAX_MEMBERS: usize = 4096;
/// Longest time that a question for changes waits, in seconds.
pub const MAX_WAIT: u64 = 55;

/// A host asks to become a member.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JoinRequest {
    /// What admits it.
    pub token: Token,
    /// What it wants to be called.
    pub name: Name,
    /// Its identity in tunnels.
    pub public_key: PublicKey,
    /// What it will show from then on, which it made itself: so that it can ask again when an answer got lost, and nobody else
    /// can in its place.
    pub credential: Credential,
}

/// It has become one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// Its own addresses, each with the network of the whole mesh.
    pub addresses: Vec<ipnet::IpNet>,
}

/// Where a member may be reached, the best first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoints {
    /// At most [`MAX_ENDPOINTS`].
    pub endpoints: Vec<SocketAddr>,
    /// Its relayed transport addresses at TURN servers (RFC 8656), at most [`MAX_RELAYED`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub relayed: Vec<SocketAddr>,
}

/// A member as others know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Unique in the mesh.
    pub name: Name,
    /// Its identity in tunnels; unique in the mesh.
    pub public_key: PublicKey,
    /// Its virtual addresses; nobody else has them.
    pub addresses: Vec<IpAddr>,
    /// Where it may be reached, the best first.
    #[serde(default)]
    pub endpoints: Vec<SocketAddr>,
    /// Where it may be reached by TURN servers of its own (RFC 8656): relays, whoever sends there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub relayed: Vec<SocketAddr>,
    /// What policy knows it by.
    #[serde(default)]
    pub tags: Vec<Name>,
}

impl Member {
    /// Whether it has no more of anything than a member can have.
    pub fn is_within_bounds(&self) -> bool {
        (1..=MAX_ADDRESSES).contains(&self.addresses.len())
            && self.endpoints.len() <= MAX_ENDPOINTS
            && self.relayed.len() <= MAX_RELAYED
            && self.tags.len() <= MAX_TAGS
    }
}

/// What changed among the others that policy lets a member talk to, in either direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Everything up to this revision is told by this answer and those before it.
    pub revision: u64,
    /// Which coordinator counts so: sent back with the next question, so that one that counts otherwise, as after a restore
    /// from a backup, tells of everybody.
    #[serde(default)]
    pub epoch: u64,
    /// Whom the asker may know, which is by the policy and its own tags, is told as of this revision: sent back with the next question.
    #[serde(default)]
    pub sight: u64,
    /// The answer tells of every member, if need be together with those that go on from it: who is in none of them is none.
    #[serde(default)]
    pub whole: bool,
    /// There is more at once: ask again.
    #[serde(default)]
    pub more: bool,
    /// New members, and those of which something is different.
    #[serde(default)]
    pub members: Vec<Member>,
    /// Who is no member any more, or none any more that the one that asks may talk to.
    #[serde(default)]
    pub removed: Vec<PublicKey>,
    /// Who may talk to whom, as far as it concerns the one that asks, if the answer is whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// What the one that asks is known by, if the answer is whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<Party>,
    /// Members that try to reach the one that asks, now: it is to send to them, which opens the NATs before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<PublicKey>,
    /// The mesh's relays, all of them in every answer, with what the one that asks shows there: at most [`MAX_RELAYS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub relays: Vec<Relay>,
    /// Where coordinators of the mesh are, all of them in every answer, if there are several: each tells the same. At most
    /// [`MAX_COORDINATORS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub coordinators: Vec<RelayAddress>,
}

/// What a member knows, as it was told: with it, it asks for what is new. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// [`Changes::revision`].
    pub revision: u64,
    /// [`Changes::epoch`].
    pub epoch: u64,
    /// [`Changes::sight`].
    pub sight: u64,
}

impl From<u64> for Cursor {
    /// Everything up to this revision.
    fn from(revision: u64) -> Cursor {
        Cursor {
            revision,
            epoch: 0,
            sight: revision,
        }
    }
}

impl Changes {
    /// What is known to who takes this answer.
    pub fn cursor(&self) -> Cursor {
        Cursor {
            revision: self.revision,
            epoch: self.epoch,
            sight: self.sight,
        }
    }
}

/// A member wants to reach another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Whom.
    pub public_key: PublicKey,
}

/// A member has another key from now on. The same again is no change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rotation {
    /// Its identity in tunnels.
    pub public_key: PublicKey,
}

/// Why a coordinator does not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// For programs.
    pub reason: Reason,
    /// For people: what is wrong and what would be right.
    pub message: String,
}

/// The kinds of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// Not a request of this protocol, or out of its bounds.
    Malformed,
    /// The token is unknown, used up, expired or withdrawn: which, strangers are not told.
    BadToken,
    /// The name belongs to another member.
    NameTaken,
    /// The key belongs to another member.
    KeyTaken,
    /// Every address is taken.
    Full,
    /// Not a member's credential: never was, has left, or was revoked.
    NotAMember,
    /// Too many attempts from this address, or too many new keys.
    TooMany,
    /// The coordinator cannot reach what it knows.
    Unavailable,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}

impl Serialize for PublicKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_as_documented() {
        let member: Member = serde_json::from_str(
            r#"{"name": "db-1", "public_key": "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=",
                "addresses": ["100.80.0.2", "fd00::2"], "endpoints": ["192.0.2.1:51820", "[2001:db8::1]:7"],
                "of a later version": 1}"#,
        )
        .expect("a member");
        assert_eq!(member.name.as_str(), "db-1");
        assert_eq!(member.endpoints.len(), 2);
        assert!(member.tags.is_empty() && member.relayed.is_empty());
        // RFC 7748, section 6.1: Alice's public key.
        assert_eq!(member.public_key.as_bytes()[..4], [0x85, 0x20, 0xf0, 0x09]);
        let text = serde_json::to_string(&member).expect("text");
        assert_eq!(
            serde_json::from_str::<Member>(&text).expect("again"),
            member
        );
    }

    #[test]
    fn a_reason_of_a_later_version_is_another() {
        let refusal: Refusal =
            serde_json::from_str(r#"{"reason": "moon-phase", "message": "m"}"#).expect("a refusal");
        assert_eq!(refusal.reason, Reason::Other);
        let text = serde_json::to_string(&Reason::NotAMember).expect("text");
        assert_eq!(text, r#""not-a-member""#);
    }
}
