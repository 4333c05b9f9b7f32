//! Relays for members without a direct path, and the tickets that members present to them.

use std::num::NonZeroU16;

use rusqlite::Connection;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{
    MAX_RELAYS, Pin, Relay, RelayAddress, RelayKind, RelaySecret, RelayTls, Ticket,
};

use super::{Actor, MemberId, Store, StoreError, audit, first, next_revision, seconds, value};

/// Seconds in an hour. Tickets expire at the end of an hour, so that a ticket, and members' copy of
/// it, does not change with every answer.
const HOUR: u64 = 3_600;
/// Minimum validity of a ticket in whole hours: members use relays that long without a coordinator.
const HOURS: u64 = 24;

/// A relay without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayInfo {
    /// Address of the relay.
    pub address: RelayAddress,
    /// Protocol of the relay.
    pub kind: RelayKind,
    /// TLS port of one of seikan's own relays.
    pub tls: Option<RelayTls>,
}

impl Store {
    /// Adds a relay, or changes the kind, secret or TLS port of the one with this address, and
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
        let address = relay.address.to_string();
        let kind = match relay.kind {
            RelayKind::Seikan | RelayKind::Turn | RelayKind::Turns => relay.kind.as_str(),
            RelayKind::Other => {
                return Err(StoreError::OutOfBounds(
                    "this kind of relay is unknown: use one of seikan's own relays or a TURN server",
                ));
            }
        };
        if relay.tls.is_some() && relay.kind != RelayKind::Seikan {
            return Err(StoreError::OutOfBounds(
                "only seikan's own relays have a TLS port: add a TURN server over TLS by its own address and kind",
            ));
        }
        let port = relay.tls.map(|tls| tls.port.get());
        let pin = relay.tls.and_then(|tls| tls.pin).map(|pin| pin.to_string());
        let (secret, by) = (secret.clone(), by.clone());
        self.change(move |transaction| {
            // `IS` compares two NULL values as equal.
            let sql = "SELECT kind = ?2 AND secret = ?3 AND tls_port IS ?4 AND tls_pin IS ?5
                       FROM relay WHERE address = ?1";
            let row = (&address, kind, secret.reveal(), port, &pin);
            let same: Option<bool> = first(transaction, sql, row, |row| row.get(0))?;
            let count: u32 = value(transaction, "SELECT count(*) FROM relay", [])?;
            match same {
                Some(true) => return Ok(()),
                None if count as usize >= MAX_RELAYS => {
                    return Err(StoreError::OutOfBounds(
                        "a mesh may have at most 8 relays: remove one first",
                    ));
                }
                _ => {}
            }
            transaction.execute(
                "INSERT OR REPLACE INTO relay (address, kind, secret, tls_port, tls_pin)
                 VALUES (?1, ?2, ?3, ?4, ?5)",
                row,
            )?;
            next_revision(transaction)?;
            audit::record(transaction, seconds(now), "relay added", &address, &by)
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
        let address = address.to_string();
        let by = by.clone();
        self.change(move |transaction| {
            let sql = "DELETE FROM relay WHERE address = ?1";
            if transaction.execute(sql, [&address])? == 0 {
                return Ok(false);
            }
            next_revision(transaction)?;
            audit::record(transaction, seconds(now), "relay removed", &address, &by)?;
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
        self.read(|connection| {
            let relays = all(connection)?;
            if relays.is_empty() {
                return Ok(Vec::new());
            }
            let sql = "SELECT public_key, credential FROM member WHERE id = ?1";
            let row = first(connection, sql, [id.0], |row| {
                Ok((row.get::<_, [u8; 32]>(0)?, row.get::<_, [u8; 32]>(1)?))
            })?;
            let (key, credential) = row.ok_or(StoreError::NotAMember)?;
            let (key, holder) = (PublicKey::from_bytes(key), holder(&credential));
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
fn holder(credential: &[u8; 32]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *credential;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

fn all(connection: &Connection) -> Result<Vec<(RelayInfo, RelaySecret)>, StoreError> {
    let corrupt = || StoreError::Corrupt("relays");
    let mut statement = connection.prepare_cached(
        "SELECT address, kind, secret, tls_port, tls_pin FROM relay ORDER BY address",
    )?;
    let mut rows = statement.query([])?;
    let mut relays = Vec::new();
    while let Some(row) = rows.next()? {
        let address = row.get_ref(0)?.as_str().ok().and_then(|a| a.parse().ok());
        let kind = match row.get_ref(1)?.as_str() {
            Ok("seikan") => RelayKind::Seikan,
            Ok("turn") => RelayKind::Turn,
            Ok("turns") => RelayKind::Turns,
            _ => return Err(corrupt()),
        };
        let secret = row.get_ref(2)?.as_str().map_err(|_| corrupt())?;
        let secret = RelaySecret::parse(secret, kind).map_err(|_| corrupt())?;
        let address = address.ok_or_else(corrupt)?;
        let pin: Option<String> = row.get(4)?;
        let pin = pin.map(|pin| pin.parse()).transpose();
        let pin: Option<Pin> = pin.map_err(|_| corrupt())?;
        let port: Option<u16> = row.get(3)?;
        let port = port.map(|port| NonZeroU16::new(port).ok_or_else(corrupt));
        let tls = port.transpose()?.map(|port| RelayTls { port, pin });
        relays.push((RelayInfo { address, kind, tls }, secret));
    }
    Ok(relays)
}
