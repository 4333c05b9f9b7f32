//! Joins: how a host becomes a member.
//!
//! [`admit`] checks a request: first the token, so that a host without one learns nothing, then the
//! name and the key. It runs twice: first without the write lock, so that unauthenticated hosts
//! never hold the lock, then with it. A new member gets the lowest number that no member has had.
//! If there is none, it gets the number that has been free for longest, so that addresses are not
//! reused soon.
//!
//! A host whose answer was lost repeats its request. A request with the name, the key and the
//! credential of a member gets the same answer, even with a token that it has used up itself. Only
//! the host knows its credential, so nobody else can repeat the request.

use ipnet::IpNet;
use rusqlite::{Connection, Transaction};
use seikan_proto::mesh::{JoinRequest, Networks};

use super::members::{MemberId, record_return};
use super::{
    Actor, Store, StoreError, audit, first, networks_of, next_revision, numbers, seconds, tokens,
    value,
};

/// Result of a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joining {
    /// Id of the member in this store.
    pub id: MemberId,
    /// Number of the member, which determines its addresses: 1 to [`Networks::capacity`].
    pub number: u32,
    /// IPv4 and IPv6 address, with the prefixes of the networks.
    pub addresses: [IpNet; 2],
    /// The host was a member already, and nothing has changed.
    pub was_member: bool,
}

impl Store {
    /// Makes a host a member, or returns the result again for one that is.
    ///
    /// # Errors
    /// [`StoreError::BadToken`], [`StoreError::NameTaken`], [`StoreError::KeyTaken`],
    /// [`StoreError::Full`]; [`StoreError::NoNetworks`], [`StoreError::Corrupt`],
    /// [`StoreError::Sqlite`].
    pub fn join(
        &self,
        request: &JoinRequest,
        from: &Actor,
        now: u64,
    ) -> Result<Joining, StoreError> {
        let at = seconds(now);
        self.read_latest(|connection| admit(connection, request, at).map(drop))?;
        let (request, from) = (request.clone(), from.clone());
        self.change(move |transaction| {
            let admission = admit(transaction, &request, at)?;
            let (id, number) = match admission.existing {
                Some(existing) => existing,
                None => {
                    let added = insert_member(transaction, &admission, &request, at)?;
                    audit::record(transaction, at, "joined", request.name.as_str(), &from)?;
                    added
                }
            };
            let addresses = admission.networks.interface_addresses(number);
            Ok(Joining {
                id: MemberId(id),
                number,
                addresses: addresses.ok_or(StoreError::Corrupt("numbers"))?,
                was_member: admission.existing.is_some(),
            })
        })
    }

    /// Returns whether the local copy refuses a request. Changes of others that would admit it may
    /// not have arrived yet.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn is_refused_here(&self, request: &JoinRequest, now: u64) -> Result<bool, StoreError> {
        match self.read(|connection| admit(connection, request, seconds(now)).map(drop)) {
            Ok(()) => Ok(false),
            Err(error @ StoreError::Sqlite(_)) => Err(error),
            Err(_) => Ok(true),
        }
    }
}

/// A request that is admitted.
struct Admission {
    networks: Networks,
    token: tokens::Found,
    /// The member that sends it, if it is one.
    existing: Option<MemberRow>,
}

/// Id and number of a member.
type MemberRow = (i64, u32);

fn admit(connection: &Connection, request: &JoinRequest, at: i64) -> Result<Admission, StoreError> {
    let networks = networks_of(connection)?.ok_or(StoreError::NoNetworks)?;
    let token = tokens::find(connection, &request.token.digest(), at)?;
    let token = token.ok_or(StoreError::BadToken)?;
    let existing = match with_key(connection, request)? {
        Some((existing, true)) => Some(existing),
        // A host without a valid token learns nothing about members.
        _ if token.used_up => return Err(StoreError::BadToken),
        Some((_, false)) => {
            return Err(StoreError::KeyTaken {
                key: request.public_key,
            });
        }
        None if name_taken(connection, request)? => {
            return Err(StoreError::NameTaken {
                name: request.name.clone(),
            });
        }
        None => None,
    };
    Ok(Admission {
        networks,
        token,
        existing,
    })
}

/// Returns id and number of the member with the requested key, and whether name and credential
/// match, too.
fn with_key(
    connection: &Connection,
    request: &JoinRequest,
) -> Result<Option<(MemberRow, bool)>, StoreError> {
    let sql = "SELECT id, number, name = ?2 AND credential = ?3 FROM member WHERE public_key = ?1";
    let credential = request.credential.digest();
    let parameters = (
        request.public_key.as_bytes(),
        request.name.as_str(),
        credential.0,
    );
    first(connection, sql, parameters, |row| {
        Ok(((row.get(0)?, row.get(1)?), row.get(2)?))
    })
}

fn name_taken(connection: &Connection, request: &JoinRequest) -> Result<bool, StoreError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM member WHERE name = ?1)";
    value(connection, sql, [request.name.as_str()])
}

/// A new member: its id and its number.
fn insert_member(
    transaction: &Transaction<'_>,
    admission: &Admission,
    request: &JoinRequest,
    at: i64,
) -> Result<(i64, u32), StoreError> {
    let number = numbers::take(transaction, &admission.networks)?;
    let revision = next_revision(transaction)?;
    let key = request.public_key.as_bytes();
    record_return(transaction, key)?;
    transaction.execute(
        "INSERT INTO member (number, name, public_key, credential, token, tags, endpoints,
                             revision, joined)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, '[]', ?7, ?8)",
        (
            number,
            request.name.as_str(),
            key,
            request.credential.digest().0,
            admission.token.id,
            &admission.token.tags,
            revision,
            at,
        ),
    )?;
    let id = transaction.last_insert_rowid();
    tokens::count_use(transaction, admission.token.id)?;
    Ok((id, number))
}
