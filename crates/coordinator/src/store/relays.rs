//! Relays for members that do not reach each other, and the tickets that members show there.

use rusqlite::{Connection, OptionalExtension as _};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{MAX_RELAYS, Relay, RelayAddress, RelayKind, RelaySecret, Ticket};

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
}

impl Store {
    /// Adds a relay, or gives the one with this address another kind or secret; members hear of it. The same again is no change.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`]: more than [`MAX_RELAYS`], or a kind that this version does not know; [`StoreError::Sqlite`].
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
        let (secret, by) = (secret.clone(), by.clone());
        self.change(move |transaction| {
            let sql = "SELECT kind, secret FROM relay WHERE address = ?1";
            let known: Option<(String, String)> = transaction
                .query_row(sql, [&address], |row| Ok((row.get(0)?, row.get(1)?)))
                .optional()?;
            let count: u32 =
                transaction.query_row("SELECT count(*) FROM relay", [], |row| row.get(0))?;
            match known {
                Some((of, with)) if of == kind && with == secret.reveal() => return Ok(()),
                None if count as usize >= MAX_RELAYS => {
                    return Err(StoreError::OutOfBounds(
                        "a mesh has 8 relays at most: remove one first",
                    ));
                }
                _ => {}
            }
            transaction.execute(
                "INSERT OR REPLACE INTO relay (address, kind, secret) VALUES (?1, ?2, ?3)",
                (&address, kind, secret.reveal()),
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
            let mut statement =
                connection.prepare_cached("SELECT public_key FROM member WHERE id = ?1")?;
            let key: Option<[u8; 32]> = statement.query_row([id.0], |row| row.get(0)).optional()?;
            let key = PublicKey::from_bytes(key.ok_or(StoreError::NotAMember)?);
            let relays = relays.into_iter().map(|(info, secret)| Relay {
                address: info.address,
                kind: info.kind,
                ticket: Ticket::new(&secret, &key, expires),
            });
            Ok(relays.collect())
        })
    }
}

fn all(connection: &Connection) -> Result<Vec<(RelayInfo, RelaySecret)>, StoreError> {
    let corrupt = || StoreError::Corrupt("relays");
    let mut statement =
        connection.prepare_cached("SELECT address, kind, secret FROM relay ORDER BY address")?;
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
        relays.push((RelayInfo { address, kind }, secret));
    }
    Ok(relays)
}
