//! What both ends of a TLS connection of ours need: the certificate that a server is known by ([`certificate`]), trust in it ([`pinned()`]),
//! and a stream of frames that never waits ([`stream`]).
#![forbid(unsafe_code)]

pub mod certificate;
mod pinned;
pub mod stream;

pub use certificate::{Certificate, TlsError};
pub use pinned::pinned;
pub use stream::Stream;
