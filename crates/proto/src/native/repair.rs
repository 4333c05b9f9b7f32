//! Loss repair: parity records, from which the receiver restores records that the path lost.
//!
//! The sender collects consecutive records in a *block*. When the block ends, it sends parity
//! records, and any of them restores any one lost record of the block ([`gf256::factor`]). Records
//! themselves are sent at once and unchanged: the code is systematic. The receiver holds back TCP
//! segments that arrived after a lost record until it is restored, or for [`receiver::HOLD`], so
//! that TCP does not see the loss. Everything else is passed on at once, also the segments of flows
//! that miss nothing ([`flows`]).
//!
//! Congestion is not hidden. A record that was lost where a queue is full counts as marked CE once
//! it is restored, as if the queue had marked instead of dropped it (RFC 3168, RFC 6040): flows that
//! know ECN slow down, packets of others are dropped. [`verdict`] tells these losses from others.
//!
//! The number of parity records follows the losses that the receiver reports ([`sender`]). A path
//! without loss has none, except for its first records.

pub mod flows;
pub mod gf256;
pub mod parity;
pub mod receiver;
pub mod sender;
pub mod verdict;

pub use receiver::Receiver;
pub use sender::Sender;
