//! Loss repair: parity records, from which the receiver restores records that the path lost.
//!
//! The sender collects consecutive records in a *block*. When the block ends, it sends parity
//! records. Any n of them restore any n lost records of the block ([`gf256::factor`]). The records
//! themselves are sent at once and unchanged: the code is systematic. The receiver holds back TCP
//! segments that arrived after a lost record until it is restored, or for [`receiver::HOLD`], so
//! that TCP does not see the loss. Everything else is passed on at once, including the segments of
//! flows without a gap ([`flows`]).
//!
//! Congestion is not hidden. A record that was lost in a full queue counts as marked CE once it is
//! restored, as if the queue had marked it instead of dropping it (RFC 3168, RFC 6040): flows that
//! use ECN slow down, and packets of other flows are dropped. [`verdict`] tells these losses from
//! others.
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
