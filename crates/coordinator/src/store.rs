//! The state of one mesh: keys and values in an SQLite [`mod@file`], or in [`etcd`], which several
//! coordinators share. Either way a coordinator has a copy of all [`rows`] in memory, in which it
//! reads. A change runs on the copy, and counts once the file or etcd has the changed rows.
//!
//! [`Store::open`] creates or opens the file; [`Store::init`] sets the networks of the mesh once.
//!
//! - [`tokens`], [`join`], [`members`]: life of a member
//! - [`devices`]: devices behind members
//! - [`changes`]: changes that members receive
//! - [`policy`]: members that may talk to each other
//! - [`relays`]: relays, and tickets for them
//! - [`audit`]: log for operators
//! - [`snapshot`]: export of the whole state, and import
//!
//! Each change is one transaction on the latest rows, so it never depends on data that another
//! process has changed meanwhile. A change that members receive takes the next revision from a
//! single row, so revisions have the order of the changes.
//!
//! All functions block. Callers pass the time, in seconds since 1970; only the log entry of a
//! restore reads the clock.

mod audit;
mod changes;
mod devices;
mod error;
mod etcd;
mod file;
mod join;
mod members;
mod numbers;
mod policy;
mod relays;
mod rows;
mod snapshot;
mod tokens;

#[cfg(test)]
pub(crate) mod tests;

use std::path::Path;
use std::sync::Mutex;

use etcd::{Live, Replica};
use file::File;
use policy::PolicyHistory;
use rows::{Head, Mesh};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Networks, Pin, RelayAddress};

use crate::lock;
pub use audit::{Actor, AuditEntry};
pub use changes::Answer;
pub use devices::DeviceInfo;
pub use error::StoreError;
#[cfg(fuzzing)]
pub use etcd::fuzzing;
pub use etcd::{Etcd, PREFIX as ETCD_PREFIX};
pub use join::Joining;
pub use members::{MemberId, MemberInfo, MemberRef};
pub use relays::RelayInfo;
pub use tokens::{NewToken, TokenId, TokenInfo};

/// State of one mesh. Threads may share it; their calls run one after the other.
#[derive(Debug)]
pub struct Store {
    backing: Backing,
    policies: PolicyHistory,
}

/// Location of the state.
#[derive(Debug)]
enum Backing {
    File(Mutex<File>),
    Etcd(Replica),
}

impl Store {
    /// Opens the database at `path`, and creates it if there is none: the file with mode 0600, its
    /// folder with 0700. A file of an earlier version is upgraded.
    ///
    /// # Errors
    /// [`StoreError::Io`] if it cannot be created; [`StoreError::LaterVersion`];
    /// [`StoreError::NoWal`]; [`StoreError::Sqlite`] if it is no database or cannot be read and
    /// written.
    pub fn open(path: &Path) -> Result<Store, StoreError> {
        Ok(Store {
            backing: Backing::File(Mutex::new(File::open(path)?)),
            policies: PolicyHistory::default(),
        })
    }

    /// Opens a mesh in etcd, which other coordinators may have open at the same time. Loads
    /// everything before it returns.
    ///
    /// # Errors
    /// [`StoreError::EtcdSettings`], [`StoreError::Unreadable`]; [`StoreError::Unavailable`];
    /// [`StoreError::LaterVersion`]; [`StoreError::CorruptRow`]; [`StoreError::OtherMesh`].
    pub fn open_etcd(settings: &Etcd) -> Result<Store, StoreError> {
        Ok(Store {
            backing: Backing::Etcd(Replica::open(settings)?),
            policies: PolicyHistory::default(),
        })
    }

    /// Sets the networks of the mesh. They cannot change later, because members have addresses in
    /// them. Setting the same networks again is no error.
    ///
    /// # Errors
    /// [`StoreError::OtherNetworks`] if it has others; [`StoreError::Sqlite`].
    pub fn init(&self, networks: Networks, by: &Actor, now: u64) -> Result<(), StoreError> {
        let by = by.clone();
        self.change(move |mesh| {
            match mesh.networks()? {
                Some(have) if have == networks => return Ok(()),
                Some(have) => return Err(StoreError::OtherNetworks { have }),
                None => {}
            }
            mesh.put(Head {
                networks: Some(networks),
                ..mesh.head()
            })?;
            let subject = format!("{} {}", networks.v4, networks.v6);
            audit::record(mesh, now, "networks set", &subject, &by)
        })
    }

    /// Returns the networks of the mesh; `None` before [`Store::init`].
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn networks(&self) -> Result<Option<Networks>, StoreError> {
        self.read(Mesh::networks)
    }

    /// Returns the revision of the latest change that members receive; 0 before the first.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn revision(&self) -> Result<u64, StoreError> {
        self.read(|mesh| Ok(mesh.head().revision))
    }

    /// Returns a number that changes when another process or another [`Store`] has written to the
    /// same state. Changes by this store leave it as it is. The call is cheap.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn data_version(&self) -> Result<i64, StoreError> {
        match &self.backing {
            Backing::File(file) => lock(file).data_version(),
            Backing::Etcd(replica) => Ok(replica.foreign()),
        }
    }

    /// Returns the random number of a mesh in etcd; `None` for a file.
    pub fn mesh(&self) -> Option<u64> {
        self.replica()?.mesh()
    }

    /// Returns a number that is the same for all coordinators with the same state in etcd, and that
    /// changes if etcd is restored from a backup; `None` for a file.
    pub fn epoch(&self) -> Option<u64> {
        self.replica().map(Replica::epoch)
    }

    /// Repairs a mesh that came back from an earlier backup of etcd: continues revisions, numbers
    /// and ids after those that this store knows. Call it whenever [`Store::data_version`] has
    /// changed; changes do it themselves.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]; [`StoreError::Unknown`].
    pub fn repair(&self) -> Result<(), StoreError> {
        self.replica().map_or(Ok(()), Replica::repair)
    }

    /// Sets a function that is called when others have changed something or call a member, on a
    /// thread that must not block. For a file it is never called.
    pub fn listen(&self, listener: impl Fn() + Send + Sync + 'static) {
        if let Some(replica) = self.replica() {
            replica.listen(Box::new(listener));
        }
    }

    /// Reports a call of a member to the other coordinators of the mesh.
    pub fn call(&self, member: MemberId, caller: PublicKey) {
        if let Some(live) = self.live() {
            live.queue_call(member.0, caller);
        }
    }

    /// Returns whether a member that has polled here has polled another coordinator since.
    pub fn polls_elsewhere(&self, member: MemberId) -> bool {
        self.live()
            .is_some_and(|live| live.polls_elsewhere(member.0))
    }

    /// Takes the calls that other coordinators have reported since the last call of this function:
    /// the callee and the caller.
    pub fn calls(&self) -> Vec<(MemberId, PublicKey)> {
        let calls = self.live().map(Live::take_calls).into_iter().flatten();
        calls
            .map(|call| (MemberId(call.member), call.caller))
            .collect()
    }

    /// Returns the addresses of the live coordinators of the mesh, this one included; empty for a
    /// file.
    pub fn coordinators(&self) -> Vec<RelayAddress> {
        self.live().map(Live::coordinators).unwrap_or_default()
    }

    /// Returns the pin by which members verify every coordinator of the mesh: `own`, unless an
    /// earlier coordinator has stored another one.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]; [`StoreError::Unknown`].
    pub fn agree_on_pin(&self, own: Pin) -> Result<Pin, StoreError> {
        let known = self.read(|mesh| Ok(mesh.head().pin))?;
        if self.replica().is_none() || known.is_some() {
            return Ok(known.unwrap_or(own));
        }
        self.change(move |mesh| {
            let head = mesh.head();
            let pin = head.pin.unwrap_or(own);
            mesh.put(Head {
                pin: Some(pin),
                ..head
            })?;
            Ok(pin)
        })
    }

    /// Waits until the copy has all changes that others have made so far. Returns whether the copy
    /// may have been behind; a file never is.
    fn catch_up(&self) -> Result<bool, StoreError> {
        let replica = self.replica();
        replica.map_or(Ok(false), |replica| replica.catch_up().map(|()| true))
    }

    /// Returns the replica of a mesh in etcd; `None` for a file.
    fn live(&self) -> Option<&Live> {
        self.replica().map(Replica::live)
    }

    fn replica(&self) -> Option<&Replica> {
        match &self.backing {
            Backing::File(_) => None,
            Backing::Etcd(replica) => Some(replica),
        }
    }

    /// Reads.
    fn read<T>(&self, work: impl FnOnce(&Mesh) -> Result<T, StoreError>) -> Result<T, StoreError> {
        match &self.backing {
            Backing::File(file) => work(lock(file).copy()?),
            Backing::Etcd(replica) => work(&*replica.copy()?),
        }
    }

    /// Reads; on an error waits for the changes of others and reads again, because the copy may
    /// have been behind.
    fn read_latest<T>(
        &self,
        work: impl Fn(&Mesh) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let found = self.read(&work);
        match found {
            // Read again even if the copy is up to date now: the change may have arrived right
            // after the first read.
            Err(_) if self.catch_up()? => self.read(&work),
            found => found,
        }
    }

    /// Changes the state within one transaction. The work may run more than once and on another
    /// thread; the effect of only one run is kept.
    fn change<T: Send + 'static>(
        &self,
        work: impl Fn(&mut Mesh) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        match &self.backing {
            Backing::File(file) => lock(file).change(work),
            Backing::Etcd(replica) => replica.change(work),
        }
    }

    /// Changes rows that coordinators do not share.
    fn change_local(
        &self,
        work: impl FnOnce(&mut Mesh) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        match &self.backing {
            Backing::File(file) => lock(file).change(work),
            Backing::Etcd(replica) => {
                let mut copy = replica.copy()?;
                let done = work(&mut copy);
                copy.forget();
                done
            }
        }
    }
}
