//! The kernel's state of a TCP connection: `TCP_INFO` (tcp(7)).

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// The current state of the sending side of a connection (`struct tcp_info`,
/// include/uapi/linux/tcp.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// Maximum segment size in bytes of payload.
    pub segment: u32,
    /// Congestion window, in segments.
    pub congestion_window: u32,
    /// Segments retransmitted since the connection began.
    pub retransmitted: u32,
    /// Smoothed round-trip time.
    pub round_trip: Duration,
}

impl TcpInfo {
    /// Reads the state of `socket`.
    ///
    /// # Errors
    /// Those of getsockopt(2): `ENOPROTOOPT` or `EOPNOTSUPP` for anything but a TCP socket.
    pub fn of(socket: &impl AsFd) -> io::Result<Self> {
        // SAFETY: `tcp_info` is made of integers and bit fields, for which all zeros is a value.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
        // SAFETY: the pointers are to a live `tcp_info` and to its length, and the kernel writes no
        // more than that length (a kernel with a shorter structure leaves the rest zero).
        let status = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                (&raw mut info).cast(),
                &raw mut length,
            )
        };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            segment: info.tcpi_snd_mss,
            congestion_window: info.tcpi_snd_cwnd,
            retransmitted: info.tcpi_total_retrans,
            round_trip: Duration::from_micros(info.tcpi_rtt.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    #[test]
    fn a_new_connection_has_the_initial_window_and_sent_nothing_again() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let to = listener.local_addr().expect("address");
        let stream = TcpStream::connect(to).expect("connect");
        let info = TcpInfo::of(&stream).expect("info");
        // RFC 6928: ten segments.
        assert_eq!((info.congestion_window, info.retransmitted), (10, 0));
        assert!(info.segment >= 536, "RFC 9293, section 3.7.1: {info:?}");
    }

    #[test]
    fn other_sockets_have_none() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        assert!(TcpInfo::of(&socket).is_err());
    }
}
