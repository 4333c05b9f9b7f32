//! Errors of netlink requests, with advice for the operator.

use std::io;

use nix::errno::Errno;

/// A refused or failed request. `action` completes the sentence "cannot ...".
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket could not be opened.
    #[error("cannot open a netlink socket: {source}")]
    Open {
        /// From socket(2), bind(2) or connect(2).
        source: io::Error,
    },
    /// The socket failed during a request.
    #[error("cannot {action}: the netlink socket failed: {source}")]
    Socket {
        /// The action that failed.
        action: String,
        /// From send(2) or recv(2).
        source: io::Error,
    },
    /// `EPERM`.
    #[error(
        "cannot {action}: not permitted; run as root or give the process CAP_NET_ADMIN \
         in this network namespace"
    )]
    NotPermitted {
        /// The action that failed.
        action: String,
    },
    /// `ENODEV`, or no interface has the name.
    #[error("cannot {action}: no such network interface; `ip link` lists the interfaces")]
    NoSuchDevice {
        /// The action that failed, with the interface.
        action: String,
    },
    /// `ESRCH`, `ENOENT`, `EADDRNOTAVAIL`: the address, route, rule or kernel module does not exist.
    #[error("cannot {action}: not found")]
    NotFound {
        /// The action that failed.
        action: String,
    },
    /// `EEXIST`.
    #[error("cannot {action}: it exists already; remove it first or choose another")]
    Exists {
        /// The action that failed.
        action: String,
    },
    /// An interface name that the kernel would refuse (`dev_valid_name()`, net/core/dev.c).
    #[error("`{name}` cannot be an interface name: {reason}")]
    InvalidName {
        /// The name as given.
        name: String,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// Any other refusal by the kernel.
    #[error("cannot {action}: {errno}{}{}", dash(detail), dash(remedy))]
    Refused {
        /// The action that failed.
        action: String,
        /// The kernel's error number.
        errno: Errno,
        /// The kernel's message (extended acknowledgement), if there is one.
        detail: String,
        /// A usual remedy, if there is one.
        remedy: &'static str,
    },
    /// A reply that is malformed or lacks the requested object.
    #[error("cannot {action}: the kernel's reply is malformed: {reason}")]
    Malformed {
        /// The action that failed.
        action: String,
        /// The defect of the reply.
        reason: String,
    },
    /// The table changed during each of several attempts to list it.
    #[error("cannot {action}: it changed faster than it could be read; try again")]
    Unsteady {
        /// The action that failed.
        action: String,
    },
}

impl NetlinkError {
    /// Whether the object to be added exists.
    pub fn is_exists(&self) -> bool {
        matches!(self, Self::Exists { .. })
    }

    /// Whether the object to be changed or removed does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. } | Self::NoSuchDevice { .. })
    }

    /// Whether the kernel has no such request for this family. QEMU's emulation of Linux refuses a
    /// message that it does not translate with the same number, but from send(2).
    pub fn is_unsupported(&self) -> bool {
        let unsupported = [Errno::EOPNOTSUPP, Errno::EAFNOSUPPORT];
        match self {
            Self::Refused { errno, .. } => unsupported.contains(errno),
            Self::Socket { source, .. } => source
                .raw_os_error()
                .is_some_and(|number| unsupported.contains(&Errno::from_raw(number))),
            _ => false,
        }
    }
}

fn dash(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!("; {text}")
    }
}

/// Why an exchange failed, before the action is known.
#[derive(Debug)]
pub(super) enum Fault {
    Io(io::Error),
    Errno { errno: i32, detail: Option<String> },
    Malformed(String),
    Interrupted,
}

impl Fault {
    pub(super) fn is(&self, errno: Errno) -> bool {
        matches!(self, Self::Errno { errno: number, .. } if *number == errno as i32)
    }

    pub(super) fn into_error(self, action: String) -> NetlinkError {
        let (errno, detail) = match self {
            Self::Io(source) => return NetlinkError::Socket { action, source },
            Self::Malformed(reason) => return NetlinkError::Malformed { action, reason },
            Self::Interrupted => return NetlinkError::Unsteady { action },
            Self::Errno { errno, detail } => (Errno::from_raw(errno), detail.unwrap_or_default()),
        };
        match errno {
            Errno::EPERM => NetlinkError::NotPermitted { action },
            Errno::ENODEV => NetlinkError::NoSuchDevice { action },
            Errno::ESRCH | Errno::ENOENT | Errno::EADDRNOTAVAIL => {
                NetlinkError::NotFound { action }
            }
            Errno::EEXIST => NetlinkError::Exists { action },
            _ => NetlinkError::Refused {
                action,
                errno,
                detail,
                remedy: remedy(errno),
            },
        }
    }
}

fn remedy(errno: Errno) -> &'static str {
    match errno {
        Errno::EACCES => {
            "IPv6 is switched off there: sysctl net.ipv6.conf.{all,INTERFACE}.disable_ipv6=0"
        }
        Errno::ENETUNREACH | Errno::EHOSTUNREACH => {
            "no route leads there: the gateway must be in a network of an interface that is up"
        }
        Errno::ENETDOWN => "set the interface up first",
        Errno::EBUSY => "it is in use: set the interface down, or stop the program that uses it",
        Errno::EOPNOTSUPP => "this kernel or this kind of interface does not support it",
        Errno::EINVAL | Errno::ERANGE => "a value is out of range for the interface",
        Errno::ENOBUFS | Errno::ENOMEM => "the kernel is short of memory",
        _ => "",
    }
}
