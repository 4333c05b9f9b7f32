//! Relays for members that do not reach each other, and the tickets that members show there.

use std::num::NonZeroU16;

use rusqlite::{Connection, OptionalExtension as _};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{
    MAX_RELAYS, Pin, Relay, RelayAddress, RelayKind, RelaySecret, RelayTls, Ticket,
};

use super::{Actor, MemberId, Store, StoreError, audit, next_revision, seconds};

/// Seconds in an hour. A ticket is good until the end of one, so that its text, and what members keep of it, does not change with every
/// answer.
const HOUR: u64 = 3_600;
/// Whole hours that a ticket is good for, at least: members go on that long without a coordinator.
const HOURS: u64 = 24;

/// A relay as operators see it, without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayInfo {
    /// Where it is.
    pub address: RelayAddress,
    /// How it is spoken to.
    pub kind: RelayKind,
    /// Where one of ours is by TLS as well.
    pub tls: Option<RelayTls>,
}

impl Store {
    /// Adds a relay, or gives the one with this address another kind, secret or port of TLS; members hear of it. The same again
    /// is no change.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`]: more than [`MAX_RELAYS`], a kind that this version does not know, or a TURN server that is to be like
    /// ours by TLS; [`StoreError::Sqlite`].
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
                    "a relay is one of seikan's or a TURN server",
                ));
            }
        };
        if relay.tls.is_some() && relay.kind != RelayKind::Seikan {
            return Err(StoreError::OutOfBounds(
                "a TURN server by TLS has an address of its own, as another kind of a relay",
            ));
        }
        let port = relay.tls.map(|tls| tls.port.get());
        let pin = relay.tls.and_then(|tls| tls.pin).map(|pin| pin.to_string());
        let (secret, by) = (secret.clone(), by.clone());
        self.change(move |transaction| {
            // `IS` takes two that are NULL for the same.
            let sql = "SELECT kind = ?2 AND secret = ?3 AND tls_port IS ?4 AND tls_pin IS ?5
                       FROM relay WHERE address = ?1";
            let row = (&address, kind, secret.reveal(), port, &pin);
            let same: Option<bool> = transaction
                .query_row(sql, row, |row| row.get(0))
                .optional()?;
            let count: u32 =
                transaction.query_row("SELECT count(*) FROM relay", [], |row| row.get(0))?;
            match same {
                Some(true) => return Ok(()),
                None if count as usize >= MAX_RELAYS => {
                    return Err(StoreError::OutOfBounds(
                        "a mesh has 8 relays at most: remove one first",
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
            audit::note(transaction, seconds(now), "relay added", &address, &by)
        })
    }

    /// Takes a relay out of the mesh; members hear of it. Whether there was one.
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
            audit::note(transaction, seconds(now), "relay removed", &address, &by)?;
            Ok(true)
        })
    }

    /// All relays by their addresses.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn relays(&self) -> Result<Vec<RelayInfo>, StoreError> {
        let relays = self.look(all)?;
        Ok(relays.into_iter().map(|(info, _)| info).collect())
    }

    /// All relays with tickets for a member, each good for 24 hours at least.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`], [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn tickets(&self, id: MemberId, now: u64) -> Result<Vec<Relay>, StoreError> {
        let expires = (now / HOUR).saturating_add(HOURS + 1).saturating_mul(HOUR);
        self.look(|connection| {
            let relays = all(connection)?;
            if relays.is_empty() {
                return Ok(Vec::new());
            }
            let mut statement = connection
                .prepare_cached("SELECT public_key, credential FROM member WHERE id = ?1")?;
            let row = statement.query_row([id.0], |row| {
                Ok((row.get::<_, [u8; 32]>(0)?, row.get::<_, [u8; 32]>(1)?))
            });
            let (key, credential) = row.optional()?.ok_or(StoreError::NotAMember)?;
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

/// The number that a relay counts a member by: part of the digest of its credential, which stays the same for as long as it is a member and
/// is another's nowhere, in whatever mesh. Nobody gets from it to the credential.
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
