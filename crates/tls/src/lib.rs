//! What both ends of a TLS connection of ours need: the certificate that a server is known by ([`certificate`]), and a stream of frames
//! that never waits ([`stream`]).
#![forbid(unsafe_code)]

pub mod certificate;
pub mod stream;

pub use certificate::{Certificate, TlsError};
pub use stream::Stream;
