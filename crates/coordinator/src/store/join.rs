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
use seikan_proto::mesh::{Endpoints, JoinRequest, Networks, Party};

use super::members::MemberId;
use super::rows::{Bytes, Head, MemberRow, Mesh, Recent, Term, TokenRow};
use super::{Actor, Store, StoreError, TokenId, audit, numbers, tokens};

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
        self.join_if(request, from, now, |_| true)
    }

    /// Does the same, if `may_join` allows another host to join with the token. It is asked once,
    /// before the change, and not for a host that is a member already.
    ///
    /// # Errors
    /// Those of [`Store::join`]; [`StoreError::TooManyJoins`].
    pub fn join_if(
        &self,
        request: &JoinRequest,
        from: &Actor,
        now: u64,
        may_join: impl FnOnce(TokenId) -> bool,
    ) -> Result<Joining, StoreError> {
        let token = self.read_latest(|mesh| {
            let admission = admit(mesh, request, now)?;
            let is_new = admission.existing.is_none();
            Ok(is_new.then_some(admission.token.info.id))
        })?;
        if token.is_some_and(|token| !may_join(token)) {
            return Err(StoreError::TooManyJoins);
        }
        let (request, from) = (request.clone(), from.clone());
        self.change(move |mesh| {
            let admission = admit(mesh, &request, now)?;
            let networks = admission.networks;
            let was_member = admission.existing.is_some();
            let (id, number) = match admission.existing {
                Some(member) => (member.id, member.number),
                None => {
                    let token = admission.token.clone();
                    let added = insert_member(mesh, &networks, token, &request, now)?;
                    audit::record(mesh, now, "joined", request.name.as_str(), &from)?;
                    added
                }
            };
            let addresses = networks.interface_addresses(number);
            Ok(Joining {
                id: MemberId(id),
                number,
                addresses: addresses.ok_or(StoreError::Corrupt("numbers"))?,
                was_member,
            })
        })
    }

    /// Returns whether the local copy refuses a request. Changes of others that would admit it may
    /// not have arrived yet.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn is_refused_here(&self, request: &JoinRequest, now: u64) -> Result<bool, StoreError> {
        match self.read(|mesh| admit(mesh, request, now).map(drop)) {
            Ok(()) => Ok(false),
            Err(error @ StoreError::Sqlite(_)) => Err(error),
            Err(_) => Ok(true),
        }
    }
}

/// A request that is admitted.
struct Admission<'m> {
    networks: Networks,
    token: &'m TokenRow,
    /// The member that sends it, if it is one.
    existing: Option<&'m MemberRow>,
}

fn admit<'m>(mesh: &'m Mesh, request: &JoinRequest, at: u64) -> Result<Admission<'m>, StoreError> {
    let networks = mesh.networks()?.ok_or(StoreError::NoNetworks)?;
    let token = tokens::find(mesh, request.token.digest(), at).ok_or(StoreError::BadToken)?;
    let key = request.public_key;
    let with_key = mesh.member.find(&Term::PublicKey(Bytes::from(&key)));
    let is_sender = |member: &&MemberRow| {
        member.own.name == request.name && member.credential == request.credential.digest().into()
    };
    let existing = with_key.filter(is_sender);
    if existing.is_none() {
        // A host without a valid token learns nothing about members.
        if token.info.is_used_up() {
            return Err(StoreError::BadToken);
        }
        if with_key.is_some() {
            return Err(StoreError::KeyTaken { key });
        }
        let name = request.name.clone();
        if mesh.member.find(&Term::Name(name.clone())).is_some() {
            return Err(StoreError::NameTaken { name });
        }
    }
    Ok(Admission {
        networks,
        token,
        existing,
    })
}

/// Makes a host a member; returns its id and its number.
fn insert_member(
    mesh: &mut Mesh,
    networks: &Networks,
    mut token: TokenRow,
    request: &JoinRequest,
    joined: u64,
) -> Result<(i64, u32), StoreError> {
    let number = numbers::take(mesh, networks)?;
    let revision = mesh.next_revision()?;
    let id = mesh.head().last_member.saturating_add(1);
    mesh.put(Head {
        last_member: id,
        ..mesh.head()
    })?;
    mesh.put(MemberRow {
        id,
        number,
        own: Party {
            name: request.name.clone(),
            tags: token.info.tags.clone(),
            gateway: None,
        },
        public_key: Bytes::from(&request.public_key),
        credential: request.credential.digest().into(),
        token: token.info.id.0,
        endpoints: Endpoints::default(),
        devices: Vec::new(),
        revision,
        joined,
        recent: Recent::default(),
    })?;
    token.info.used = token.info.used.saturating_add(1);
    mesh.put(token)?;
    Ok((id, number))
}
