//! Relays for members without a direct path, and the tickets that members present to them.

use seikan_proto::mesh::{
    MAX_RELAYS, Relay, RelayAddress, RelayKind, RelaySecret, RelayTls, Ticket,
};
use serde::{Deserialize, Serialize};

use super::rows::{Bytes, Mesh, RelayRow};
use super::{Actor, MemberId, Store, StoreError, audit};

/// Seconds in an hour. Tickets expire at the end of an hour, so that a ticket, and members' copy of
/// it, does not change with every answer.
const HOUR: u64 = 3_600;
/// Minimum validity of a ticket in whole hours: members use relays that long without a coordinator.
const HOURS: u64 = 24;

/// A relay without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayInfo {
    /// Address of the relay.
    pub address: RelayAddress,
    /// Protocol of the relay.
    pub kind: RelayKind,
    /// TLS port of one of seikan's own relays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<RelayTls>,
}

impl Store {
    /// Adds a relay, or changes kind, secret or TLS port of the relay with this address, and
    /// notifies members. Adding the same relay again changes nothing.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`] for more than [`MAX_RELAYS`], an unknown kind, or a TURN server
    /// with a TLS port; [`StoreError::Sqlite`].
    pub fn add_relay(
        &self,
        relay: &RelayInfo,
        secret: &RelaySecret,
        by: &Actor,
        now: u64,
    ) -> Result<(), StoreError> {
        if relay.kind == RelayKind::Other {
            return Err(StoreError::OutOfBounds(
                "this kind of relay is unknown: use one of seikan's own relays or a TURN server",
            ));
        }
        if relay.tls.is_some() && relay.kind != RelayKind::Seikan {
            return Err(StoreError::OutOfBounds(
                "only seikan's own relays have a TLS port: add a TURN server over TLS by its own address and kind",
            ));
        }
        let (info, secret, by) = (relay.clone(), secret.clone(), by.clone());
        self.change(move |mesh| {
            let row = RelayRow {
                info: info.clone(),
                secret: secret.reveal().to_owned(),
            };
            match mesh.relay.get(&info.address) {
                Some(same) if *same == row => return Ok(()),
                None if mesh.relay.all().count() >= MAX_RELAYS => {
                    return Err(StoreError::OutOfBounds(
                        "a mesh may have at most 8 relays: remove one first",
                    ));
                }
                _ => {}
            }
            mesh.put(row)?;
            mesh.next_revision()?;
            let subject = info.address.to_string();
            audit::record(mesh, now, "relay added", &subject, &by)
        })
    }

    /// Removes a relay and notifies members. Returns whether there was one.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn remove_relay(
        &self,
        address: &RelayAddress,
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        let (address, by) = (address.clone(), by.clone());
        self.change(move |mesh| {
            if mesh.relay.get(&address).is_none() {
                return Ok(false);
            }
            mesh.delete::<RelayRow>(address.clone())?;
            mesh.next_revision()?;
            audit::record(mesh, now, "relay removed", &address.to_string(), &by)?;
            Ok(true)
        })
    }

    /// Returns all relays in the order of their addresses.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn relays(&self) -> Result<Vec<RelayInfo>, StoreError> {
        let relays = self.read(all)?;
        Ok(relays.into_iter().map(|(info, _)| info).collect())
    }

    /// Returns all relays with tickets for a member, each valid for at least 24 hours.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`], [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn tickets(&self, id: MemberId, now: u64) -> Result<Vec<Relay>, StoreError> {
        let expires = (now / HOUR).saturating_add(HOURS + 1).saturating_mul(HOUR);
        self.read(|mesh| {
            let relays = all(mesh)?;
            if relays.is_empty() {
                return Ok(Vec::new());
            }
            let member = mesh.member.get(&id.0).ok_or(StoreError::NotAMember)?;
            let (key, holder) = (member.public_key.into(), holder(&member.credential));
            let relays = relays.into_iter().map(|(info, secret)| Relay {
                address: info.address,
                kind: info.kind,
                tls: info.tls,
                ticket: Ticket::new(&secret, holder, &key, expires),
            });
            Ok(relays.collect())
        })
    }
}

/// Returns the number by which a relay counts a member's use: part of the digest of its credential.
/// It stays the same during a membership and is unique across meshes. The credential cannot be
/// derived from it.
fn holder(credential: &Bytes) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = credential.0;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

fn all(mesh: &Mesh) -> Result<Vec<(RelayInfo, RelaySecret)>, StoreError> {
    let relays = mesh.relay.all().map(|row| {
        let secret = RelaySecret::parse(&row.secret, row.info.kind);
        let secret = secret.map_err(|_| StoreError::Corrupt("relays"))?;
        Ok((row.info.clone(), secret))
    });
    relays.collect()
}
