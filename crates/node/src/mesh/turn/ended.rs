//! Why there is no allocation, for people.

use super::link::Transport;
use crate::mesh::forward::Over;
use seikan_sys::udp::UdpError;
use std::io;

/// Why there is no allocation (any more).
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("no answer by {name}", name = .0.name())]
    NoAnswer(Transport),
    #[error("no connection by {}: {source}", .transport.name())]
    Unconnected {
        transport: Transport,
        source: io::Error,
    },
    #[error("its certificate would have to be for {0}, which is neither a name nor an address")]
    Name(String),
    #[error("it refuses, by {}: {}", .transport.name(), describe(*.code))]
    Refused { transport: Transport, code: u16 },
    #[error("what speaks to it here has failed")]
    Failed,
    #[error("it does not answer any more")]
    Silent,
    #[error("the connection to it is lost: {0}")]
    Lost(io::Error),
    #[error("it has taken the allocation back: {why}", why = describe(*.0))]
    TakenBack(u16),
    #[error("more hosts were let in than one allocation bears; there is a new one soon")]
    Full,
    #[error("{0}")]
    Socket(#[from] UdpError),
    #[error(transparent)]
    Over(#[from] Over),
}

/// The error codes of RFC 8656, section 19, and RFC 8489, section 14.8, for people; what the server itself says is not shown.
fn describe(code: u16) -> String {
    let text = match code {
        0 => return "without a reason".to_owned(),
        401 | 441 => {
            "it does not take the ticket: another secret, or its clock is not the coordinator's"
        }
        403 => "forbidden",
        420 => "it does not know an attribute",
        437 | 438 => "it knows nothing of the allocation",
        440 => "it has no addresses of this family to give",
        442 => "it does not relay UDP",
        486 => "this member's share is used",
        508 => "it has no more to give",
        _ => return format!("error {code}"),
    };
    format!("{text} ({code})")
}
