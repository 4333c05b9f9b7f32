//! What can go wrong with a netlink request, told so that the reader knows what to do next.

use std::io;

use nix::errno::Errno;

/// A refused or failed request. `action` completes the sentence "cannot ...".
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// No socket.
    #[error("cannot open a netlink socket: {source}")]
    Open {
        /// From socket(2), bind(2) or connect(2).
        source: io::Error,
    },
    /// The socket failed in the middle of a request.
    #[error("cannot {action}: the netlink socket failed: {source}")]
    Socket {
        /// What was attempted.
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
        /// What was attempted.
        action: String,
    },
    /// `ENODEV`, or a name that no interface has.
    #[error("cannot {action}: no such network interface; `ip link` lists those there are")]
    NoSuchDevice {
        /// What was attempted, to which interface.
        action: String,
    },
    /// `ESRCH`, `ENOENT`, `EADDRNOTAVAIL`: the address, route or rule is not there.
    #[error("cannot {action}: there is none")]
    NotFound {
        /// What was attempted.
        action: String,
    },
    /// `EEXIST`.
    #[error("cannot {action}: it exists already; remove it first or choose another")]
    Exists {
        /// What was attempted.
        action: String,
    },
    /// An interface name that the kernel would not take (`dev_valid_name()`, net/core/dev.c).
    #[error("`{name}` cannot be an interface name: {reason}")]
    InvalidName {
        /// The name as given.
        name: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// Any other refusal by the kernel.
    #[error("cannot {action}: {errno}{}{}", dash(detail), dash(remedy))]
    Refused {
        /// What was attempted.
        action: String,
        /// The kernel's error number.
        errno: Errno,
        /// The kernel's own sentence (extended acknowledgement), if it sent one.
        detail: String,
        /// What usually helps, if known.
        remedy: &'static str,
    },
    /// A reply that cannot be understood, or that lacks what was asked for.
    #[error("cannot {action}: the kernel's reply makes no sense: {reason}")]
    Malformed {
        /// What was attempted.
        action: String,
        /// What is wrong with the reply.
        reason: String,
    },
    /// The table changed during every one of several attempts to list it.
    #[error("cannot {action}: it changed faster than it could be read; try again")]
    Unsteady {
        /// What was attempted.
        action: String,
    },
}

impl NetlinkError {
    /// The object to be changed or removed is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. } | Self::NoSuchDevice { .. })
    }
}

fn dash(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!("; {text}")
    }
}

/// How an exchange failed, before it is known what it was for.
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
        Errno::EBUSY => "it is in use: set the interface down or close what holds it",
        Errno::EOPNOTSUPP => "this kernel or this kind of interface cannot do it",
        Errno::EINVAL | Errno::ERANGE => "a value is outside what the interface takes",
        Errno::ENOBUFS | Errno::ENOMEM => "the kernel is short of memory",
        _ => "",
    }
}
