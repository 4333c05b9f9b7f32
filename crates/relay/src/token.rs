//! The tokens by which epoll reports descriptors. The main sockets have the numbers of their families, 0 and 1.

/// The signal descriptor.
pub(crate) const SIGNAL: u64 = 2;
/// The listener for TLS.
pub(crate) const LISTENER: u64 = 3;
/// The first token of sockets of pairs. The socket of slot `n` and family `f` has `FIRST_PAIR + 2 * n + f`.
pub(crate) const FIRST_PAIR: u64 = 4;
/// The first token of TLS connections. Connection `id` has `FIRST_STREAM + id`.
pub(crate) const FIRST_STREAM: u64 = 1 << 32;
