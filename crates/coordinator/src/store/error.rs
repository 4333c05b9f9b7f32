//! Why the store does not do something, and what of that a stranger is told.

use std::io;
use std::path::PathBuf;

use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::policy::PolicyError;
use seikan_proto::mesh::{Name, Networks, Reason, Refusal};

/// Why the store did not do it. Nothing was changed then.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The token is unknown, used up, expired or withdrawn.
    #[error(
        "the token is not good (any more): it may be mistyped, used up, expired or withdrawn; ask for a new one"
    )]
    BadToken,
    /// Another member has the name.
    #[error("the name {name} belongs to another member: take another one")]
    NameTaken {
        /// Which name.
        name: Name,
    },
    /// A member with another name has the key.
    #[error(
        "the key {key} belongs to a member with another name: join under that name, or with a new key"
    )]
    KeyTaken {
        /// Which key.
        key: PublicKey,
    },
    /// Every address is taken.
    #[error("all {capacity} addresses of the mesh are taken: a member has to go first")]
    Full {
        /// How many there are.
        capacity: u32,
    },
    /// No member has the credential, or the id.
    #[error("this is not (any more) a member of the mesh: join it again with a token")]
    NotAMember,
    /// Too many new keys within an hour.
    #[error("a member has {most} new keys an hour at most: try again later")]
    TooManyKeys {
        /// How many may be.
        most: u32,
    },
    /// More than there may be, or too little.
    #[error("{0}")]
    OutOfBounds(&'static str),
    /// The text is no policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The file is of a later version.
    #[error(
        "{} was written by a later version of seikan (schema {found}, this one knows {known}): use that version, \
         or a copy from before",
        path.display()
    )]
    LaterVersion {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: i64,
        /// The latest schema that this version knows.
        known: i64,
    },
    /// Nobody has said yet which networks the mesh has.
    #[error("the mesh has no networks yet: initialise the coordinator first")]
    NoNetworks,
    /// The mesh has other networks.
    #[error(
        "the mesh has the networks {} and {} already: members have addresses in them, so they stay",
        have.v4, have.v6
    )]
    OtherNetworks {
        /// Those that it has.
        have: Networks,
    },
    /// The file system cannot do what SQLite needs for several processes at once.
    #[error(
        "the database cannot have a write-ahead log where it is (its journal stays `{mode}`): put it on a local disk"
    )]
    NoWal {
        /// What it has instead.
        mode: String,
    },
    /// Something in the file is not what this program writes.
    #[error("the database is damaged (its {0} cannot be understood): take a copy from before")]
    Corrupt(&'static str),
    /// The work ended before it was done.
    #[error("the coordinator ended before this was done: try again")]
    Interrupted,
    /// The file or its folder cannot be made.
    #[error("cannot make the database {}: {source}; see to its folder", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody has the file open, or moves it.
    #[error(
        "{} is in use: a coordinator runs on it, or it is being moved; end that first",
        path.display()
    )]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// There is a mesh where one was to be brought.
    #[error(
        "etcd has a mesh under {prefix} already: take another prefix, or say that it is to be replaced, which is the end of it"
    )]
    NotEmpty {
        /// What its keys begin with.
        prefix: String,
    },
    /// What is to be replaced is being changed.
    #[error(
        "the mesh under {prefix} was changed while it was to be replaced, and is as it was: end its coordinators first"
    )]
    Changing {
        /// What its keys begin with.
        prefix: String,
    },
    /// The mesh of the file may be in etcd already.
    #[error(
        "the mesh of {} is being moved to the etcd at {endpoints}, under {prefix}: do the same `seikan coordinator import` again, which ends \
         that, or take it back there with `seikan coordinator import --undo`",
        path.display()
    )]
    Moving {
        /// The file.
        path: PathBuf,
        /// What its keys begin with there.
        prefix: String,
        /// Where that etcd was when this began.
        endpoints: String,
    },
    /// Nobody moves it.
    #[error("the mesh of {} is not being moved: there is nothing to take back", path.display())]
    NotMoving {
        /// The file.
        path: PathBuf,
    },
    /// It has been moved.
    #[error(
        "all of the mesh is in etcd under {prefix}, where others may have changed it since: do the same `seikan coordinator import` again, \
         without --undo"
    )]
    HasMoved {
        /// What its keys begin with.
        prefix: String,
    },
    /// etcd has another mesh than before, or lost the one that it had.
    #[error(
        "under {prefix} etcd has {}, and not the mesh {noted} of before: see that this is the right etcd, and bring back what it had from a \
         backup (etcdctl snapshot restore); if the mesh is to be another one from now on, take the line `mesh` out of etcd.toml",
        found.map_or("no mesh".to_owned(), |found| format!("the mesh {found}"))
    )]
    OtherMesh {
        /// What its keys begin with.
        prefix: String,
        /// The number that was noted.
        noted: u64,
        /// The number of the one that is there.
        found: Option<u64>,
    },
    /// What is said about etcd cannot be right.
    #[error("etcd: {0}")]
    EtcdSettings(String),
    /// A file for etcd cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// etcd cannot be asked, or has no majority. Nothing was changed.
    #[error("etcd cannot be asked: {0}; see to its members")]
    Unavailable(String),
    /// The same, after a change was sent.
    #[error(
        "etcd took what was to be changed and did not answer: {0}; whether it is done is not known, so look before trying again"
    )]
    Unknown(String),
    /// A row in etcd is not what this program writes.
    #[error(
        "what etcd has under {key} cannot be understood: take a copy from before, or put it right"
    )]
    CorruptRow {
        /// Its key, without the prefix.
        key: String,
    },
    /// What SQLite says.
    #[error(
        "the database cannot be used: {0}; see to its file, its folder and the room on its disk"
    )]
    Sqlite(#[from] rusqlite::Error),
}

impl StoreError {
    /// The same for who asked over the network: nothing in it that only operators may know.
    pub fn refusal(&self) -> Refusal {
        let reason = match self {
            Self::BadToken => Reason::BadToken,
            Self::NameTaken { .. } => Reason::NameTaken,
            Self::KeyTaken { .. } => Reason::KeyTaken,
            Self::Full { .. } => Reason::Full,
            Self::NotAMember => Reason::NotAMember,
            Self::TooManyKeys { .. } => Reason::TooMany,
            Self::OutOfBounds(_) | Self::Policy(_) => Reason::Malformed,
            Self::LaterVersion { .. }
            | Self::NoNetworks
            | Self::OtherNetworks { .. }
            | Self::NoWal { .. }
            | Self::Corrupt(_)
            | Self::Interrupted
            | Self::Io { .. }
            | Self::InUse { .. }
            | Self::NotEmpty { .. }
            | Self::Changing { .. }
            | Self::Moving { .. }
            | Self::NotMoving { .. }
            | Self::HasMoved { .. }
            | Self::OtherMesh { .. }
            | Self::EtcdSettings(_)
            | Self::Unreadable { .. }
            | Self::Unavailable(_)
            | Self::Unknown(_)
            | Self::CorruptRow { .. }
            | Self::Sqlite(_) => {
                return Refusal {
                    reason: Reason::Unavailable,
                    message:
                        "the coordinator cannot do this now: try again later, or tell who runs it"
                            .to_owned(),
                };
            }
        };
        Refusal {
            reason,
            message: self.to_string(),
        }
    }
}
