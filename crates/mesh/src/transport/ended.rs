//! Why a transport has ended, as a text for the user.

use super::allocation::By;
use seikan_sys::udp::UdpError;
use std::io;

/// Why a transport has ended or could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("it is not needed")]
    Unwanted,
    #[error("cannot watch its socket: {0}")]
    Unwatched(io::Error),
    #[error("its protocol has failed")]
    Failed,
    #[error("no answer")]
    Mute,
    #[error("{0}")]
    Stream(io::Error),
    #[error("no answer by {name}", name = .0.name())]
    NoAnswer(By),
    #[error("cannot connect by {}: {source}", .by.name())]
    Unconnected { by: By, source: io::Error },
    #[error("cannot check its certificate: {0} is neither a name nor an address")]
    Name(String),
    #[error("it refuses the allocation by {}: {}", .by.name(), describe(*.code))]
    Refused { by: By, code: u16 },
    #[error("it stopped answering")]
    Silent,
    #[error("lost the connection: {0}")]
    Lost(io::Error),
    #[error("it revoked the allocation: {why}", why = describe(*.0))]
    TakenBack(u16),
    #[error("the allocation has permissions for too many hosts; a new one follows")]
    Full,
    #[error("{0}")]
    Socket(#[from] UdpError),
}

/// Describes the error codes of RFC 8656, section 19, and RFC 8489, section 14.8. The server's own text is not
/// displayed.
fn describe(code: u16) -> String {
    let text = match code {
        0 => return "no reason given".to_owned(),
        401 | 441 => {
            "it rejects the ticket: another secret, or its clock differs from the coordinator's"
        }
        403 => "forbidden",
        420 => "unknown attribute",
        437 | 438 => "unknown allocation",
        440 => "no addresses of this family",
        442 => "no relaying of UDP",
        486 => "this member's quota is used up",
        508 => "no capacity left",
        _ => return format!("error {code}"),
    };
    format!("{text} ({code})")
}
