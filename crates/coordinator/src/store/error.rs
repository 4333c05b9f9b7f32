//! Errors of the store, and their form for unauthenticated hosts.

use std::io;
use std::path::PathBuf;

use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::policy::PolicyError;
use seikan_proto::mesh::{DeviceName, Name, Networks, Reason, Refusal};

/// Error of the store. The state is unchanged, except possibly after [`StoreError::Unknown`].
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The token is unknown, used up, expired or withdrawn.
    #[error(
        "the token is not valid: it may be mistyped, used up, expired or withdrawn; ask the operator for a new one"
    )]
    BadToken,
    /// The name belongs to another member.
    #[error("the name {name} belongs to another member: choose another one")]
    NameTaken {
        /// The name.
        name: Name,
    },
    /// A member with another name has the key.
    #[error(
        "the key {key} belongs to a member with another name: join with that name or with a new key"
    )]
    KeyTaken {
        /// The key.
        key: PublicKey,
    },
    /// Every address is in use.
    #[error("all {capacity} addresses of the mesh are in use: remove a member first")]
    Full {
        /// Number of addresses.
        capacity: u32,
    },
    /// No member has the credential or the id.
    #[error("this host is not a member of the mesh: join again with a token")]
    NotAMember,
    /// Too many hosts have joined with one token.
    #[error(
        "too many hosts have joined with this token lately: try again later, or ask the operator for another token"
    )]
    TooManyJoins,
    /// Too many new keys within an hour.
    #[error("a member may change its key at most {most} times an hour: try again later")]
    TooManyKeys {
        /// Maximum per hour.
        most: usize,
    },
    /// No device has the name.
    #[error("no gateway has reported a device {0}; see `seikan coordinator devices`")]
    NoDevice(DeviceName),
    /// The device is not approved.
    #[error(
        "the device {0} is not approved: use `seikan coordinator approve-device {0} --tag TAG`"
    )]
    DevicePending(DeviceName),
    /// The device has no addresses, and its last ones are unknown or taken.
    #[error(
        "{0} has no addresses, and its former ones are unknown or in use by another device: approve without --from"
    )]
    NoAddresses(DeviceName),
    /// The device needs no approval, so there is none to withdraw.
    #[error(
        "{device} needs no approval, because the token of its gateway approves all its devices: run \
         `seikan coordinator withdraw {token}` first, or revoke the gateway"
    )]
    DeviceTrusted {
        /// The device.
        device: DeviceName,
        /// Number of the token.
        token: i64,
    },
    /// Too many changes of a member's devices within an hour.
    #[error("a member may change its devices at most {most} times an hour: try again later")]
    TooManyDeviceChanges {
        /// Maximum per hour.
        most: usize,
    },
    /// The mesh has the maximum number of devices.
    #[error("the mesh has {most} devices, and cannot have more: remove some at their gateways")]
    DevicesFull {
        /// Maximum number.
        most: usize,
    },
    /// A value is too large or too small.
    #[error("{0}")]
    OutOfBounds(&'static str),
    /// The text is not a policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A later version wrote the file.
    #[error(
        "cannot open {}: a later version of seikan wrote it (schema {found}; this version reads up to {known}); \
         use that version, or put back a copy from before the upgrade",
        path.display()
    )]
    LaterVersion {
        /// The file.
        path: PathBuf,
        /// Its version of the schema.
        found: i64,
        /// The latest version of the schema that this program knows.
        known: i64,
    },
    /// An earlier version wrote the mesh in etcd.
    #[error(
        "an earlier version of seikan wrote the mesh in etcd under {prefix} (schema {found}): export it with that version \
         (`seikan coordinator export`), remove it from etcd, and import the snapshot with this version"
    )]
    EarlierVersion {
        /// Prefix of its keys.
        prefix: String,
        /// Its version of the schema.
        found: i64,
    },
    /// The networks of the mesh are not set.
    #[error("the mesh has no networks yet: initialise the coordinator first")]
    NoNetworks,
    /// The mesh has other networks.
    #[error(
        "cannot change the networks of the mesh from {} and {}: members have addresses in them",
        have.v4, have.v6
    )]
    OtherNetworks {
        /// Networks of the mesh.
        have: Networks,
    },
    /// The file system does not support SQLite's write-ahead log.
    #[error(
        "cannot enable the write-ahead log of the database (journal mode `{mode}`): put it on a local disk"
    )]
    NoWal {
        /// The journal mode in effect.
        mode: String,
    },
    /// The file contains an invalid value.
    #[error("the database is damaged (invalid {0}): restore a backup")]
    Corrupt(&'static str),
    /// The work was interrupted.
    #[error("the coordinator was stopped before it finished: try again")]
    Interrupted,
    /// The file or its folder cannot be created.
    #[error("cannot create the database {}: {source}; check its folder", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The file cannot be copied before its upgrade.
    #[error(
        "cannot copy the database to {} before its upgrade: {source}; free disk space, or move an existing file of that name away",
        path.display()
    )]
    Copy {
        /// The copy.
        path: PathBuf,
        /// Error of the system or of SQLite.
        source: io::Error,
    },
    /// There is a mesh at the destination of an import.
    #[error(
        "cannot import: {location} has a mesh already; import to another place, or remove that mesh first"
    )]
    NotEmpty {
        /// The file, or the prefix in etcd.
        location: String,
    },
    /// The content is no snapshot.
    #[error(
        "cannot import: the file is no snapshot of a mesh; `seikan coordinator export` writes one"
    )]
    NotASnapshot,
    /// etcd has another mesh than before, or none.
    #[error(
        "cannot use etcd: it has {} under {prefix}, not the mesh {expected}; check that this is the right etcd, and restore its backup \
         (etcdctl snapshot restore); to use another mesh from now on, remove the line `mesh` from etcd.toml",
        found.map_or("no mesh".to_owned(), |found| format!("the mesh {found}"))
    )]
    OtherMesh {
        /// Prefix of its keys.
        prefix: String,
        /// Number of the expected mesh.
        expected: u64,
        /// Number of the mesh that was found.
        found: Option<u64>,
    },
    /// The settings for etcd are invalid.
    #[error("invalid settings for etcd: {0}")]
    EtcdSettings(String),
    /// A file that the settings for etcd name cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// etcd does not answer or has no majority. Nothing was changed.
    #[error("cannot use etcd: {0}; check its members")]
    Unavailable(String),
    /// etcd did not confirm a change that was sent.
    #[error(
        "etcd did not confirm the change: {0}; it may have been applied, so check before you try again"
    )]
    Unknown(String),
    /// The file or etcd has an invalid row.
    #[error("the mesh has an invalid value under {key}: restore a backup or correct the value")]
    CorruptRow {
        /// Its key, without the prefix.
        key: String,
    },
    /// SQLite failed.
    #[error(
        "cannot use the database: {0}; check its file, its folder and the free space of its disk"
    )]
    Sqlite(#[from] rusqlite::Error),
}

impl StoreError {
    /// Returns the error for a host: without details that only operators may know.
    pub fn refusal(&self) -> Refusal {
        let reason = match self {
            Self::BadToken => Reason::BadToken,
            Self::NameTaken { .. } => Reason::NameTaken,
            Self::KeyTaken { .. } => Reason::KeyTaken,
            Self::Full { .. } | Self::DevicesFull { .. } => Reason::Full,
            Self::NotAMember => Reason::NotAMember,
            Self::TooManyJoins | Self::TooManyKeys { .. } | Self::TooManyDeviceChanges { .. } => {
                Reason::TooMany
            }
            Self::OutOfBounds(_) | Self::Policy(_) => Reason::Malformed,
            _ => {
                return Refusal {
                    reason: Reason::Unavailable,
                    message:
                        "the coordinator cannot do this now: try again later, or tell its operator"
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
