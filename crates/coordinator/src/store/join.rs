//! How a host becomes a member.
//!
//! [`admit`] judges a request: first the token, so that who has none learns nothing; then the name and
//! the key. It is asked twice, once without the write lock, which strangers so never hold, and once
//! with it. A new member gets the lowest number that was never anybody's; once there is none, the one
//! that has been free for longest, so that an address is not soon somebody else's.
//!
//! A host whose answer got lost asks again: who shows the name, the key and the credential of a member
//! is told what it was told, even by a token that it used up itself. The credential is the host's own
//! making, so nobody else can ask in its place.

use ipnet::IpNet;
use rusqlite::{Connection, OptionalExtension as _, Transaction};
use seikan_proto::mesh::{JoinRequest, Networks};

use super::members::{MemberId, comes_again};
use super::{Actor, Store, StoreError, audit, networks_of, next_revision, seconds, tokens};

/// What a host that joined gets, its credential aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joining {
    /// Stands for the member in this store.
    pub id: MemberId,
    /// Its place in the networks, 1 to [`Networks::capacity`].
    pub number: u32,
    /// Its IPv4 and its IPv6 address, with the networks' prefixes.
    pub addresses: [IpNet; 2],
    /// It was a member already, and is what it was.
    pub again: bool,
}

impl Store {
    /// Makes a host a member, or tells one that is what it has.
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
        self.look_surely(|connection| admit(connection, request, at).map(drop))?;
        let (request, from) = (request.clone(), from.clone());
        self.change(move |transaction| {
            let admission = admit(transaction, &request, at)?;
            let (id, number) = match admission.own {
                Some(own) => own,
                None => {
                    let entered = enter(transaction, &admission, &request, at)?;
                    audit::note(transaction, at, "joined", request.name.as_str(), &from)?;
                    entered
                }
            };
            let addresses = admission.networks.interface_addresses(number);
            Ok(Joining {
                id: MemberId(id),
                number,
                addresses: addresses.ok_or(StoreError::Corrupt("numbers"))?,
                again: admission.own.is_some(),
            })
        })
    }

    /// Whether a request is refused by what is known here alone; others may have changed just now what it is refused by.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn is_refused_here(&self, request: &JoinRequest, now: u64) -> Result<bool, StoreError> {
        match self.look(|connection| admit(connection, request, seconds(now)).map(drop)) {
            Ok(()) => Ok(false),
            Err(error @ StoreError::Sqlite(_)) => Err(error),
            Err(_) => Ok(true),
        }
    }
}

/// A request that nothing speaks against.
struct Admission {
    networks: Networks,
    token: tokens::Found,
    /// The member that it comes from, if it is one.
    own: Option<Own>,
}

/// Id and number of a member.
type Own = (i64, u32);

fn admit(connection: &Connection, request: &JoinRequest, at: i64) -> Result<Admission, StoreError> {
    let networks = networks_of(connection)?.ok_or(StoreError::NoNetworks)?;
    let token = tokens::find(connection, &request.token.digest(), at)?;
    let token = token.ok_or(StoreError::BadToken)?;
    let own = match with_key(connection, request)? {
        Some((own, true)) => Some(own),
        // Whoever has no good token learns nothing of members.
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
        own,
    })
}

/// Id and number of the member with the key that is asked for, and whether it has the name and the credential, too.
fn with_key(
    connection: &Connection,
    request: &JoinRequest,
) -> Result<Option<(Own, bool)>, StoreError> {
    let mut statement = connection.prepare_cached(
        "SELECT id, number, name = ?2 AND credential = ?3 FROM member WHERE public_key = ?1",
    )?;
    let credential = request.credential.digest();
    let parameters = (
        request.public_key.as_bytes(),
        request.name.as_str(),
        credential.0,
    );
    let found = statement.query_row(parameters, |row| {
        Ok(((row.get(0)?, row.get(1)?), row.get(2)?))
    });
    Ok(found.optional()?)
}

fn name_taken(connection: &Connection, request: &JoinRequest) -> Result<bool, StoreError> {
    let mut statement =
        connection.prepare_cached("SELECT EXISTS (SELECT 1 FROM member WHERE name = ?1)")?;
    Ok(statement.query_row([request.name.as_str()], |row| row.get(0))?)
}

/// A new member: its id and its number.
fn enter(
    transaction: &Transaction<'_>,
    admission: &Admission,
    request: &JoinRequest,
    at: i64,
) -> Result<(i64, u32), StoreError> {
    let number = take_number(transaction, admission.networks.capacity())?;
    let revision = next_revision(transaction)?;
    let key = request.public_key.as_bytes();
    comes_again(transaction, key)?;
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

fn take_number(transaction: &Transaction<'_>, capacity: u32) -> Result<u32, StoreError> {
    let highest: u32 = transaction.query_row("SELECT highest FROM mesh", [], |row| row.get(0))?;
    if highest < capacity {
        transaction.execute("UPDATE mesh SET highest = ?1", [highest + 1])?;
        return Ok(highest + 1);
    }
    let sql = "SELECT number FROM freed ORDER BY since LIMIT 1";
    let freed: Option<u32> = transaction
        .query_row(sql, [], |row| row.get(0))
        .optional()?;
    let number = freed.ok_or(StoreError::Full { capacity })?;
    transaction.execute("DELETE FROM freed WHERE number = ?1", [number])?;
    Ok(number)
}
