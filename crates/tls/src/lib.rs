//! TLS for servers and clients: the certificate of a server ([`certificate`]) and its renewal
//! ([`renewal`]), a verifier that trusts a pinned certificate ([`pinned()`]), and a non-blocking
//! stream of frames ([`stream`]).
#![forbid(unsafe_code)]

pub mod certificate;
mod pinned;
pub mod renewal;
pub mod stream;

pub use certificate::{Certificate, TlsError};
pub use pinned::pinned;
pub use stream::Stream;
