//! SOCKS5 (RFC 1928) without authentication: messages as bytes.

use crate::target::{Failure, Host, Target};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const VERSION: u8 = 5;
/// The answer to a greeting: no authentication.
pub(crate) const METHOD_NONE: [u8; 2] = [VERSION, 0];
/// The answer to a greeting that offers only authentication.
pub(crate) const METHOD_UNACCEPTABLE: [u8; 2] = [VERSION, 0xff];

/// The message at the start of a client's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Parsed<T> {
    /// A part of a message.
    Partial,
    /// A message, and its length in bytes.
    Complete(T, usize),
    /// Something else.
    Invalid,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// CONNECT.
    Connect(Target),
    /// UDP ASSOCIATE; the address from which the client will send is not used.
    Associate,
    /// Another command.
    UnknownCommand,
    /// An address type or a name that does not exist.
    UnknownAddress,
}

/// Reads a greeting. Returns whether the client accepts to connect without authentication.
pub(crate) fn greeting(bytes: &[u8]) -> Parsed<bool> {
    match *bytes {
        [version, ..] if version != VERSION => Parsed::Invalid,
        [_, count, ref rest @ ..] => match rest.get(..count.into()) {
            Some(methods) => Parsed::Complete(methods.contains(&0), 2 + methods.len()),
            None => Parsed::Partial,
        },
        _ => Parsed::Partial,
    }
}

/// Reads a request.
pub(crate) fn request(bytes: &[u8]) -> Parsed<Request> {
    match *bytes {
        [version, ..] if version != VERSION => Parsed::Invalid,
        [_, command, _reserved, ref address @ ..] => match destination(address) {
            Parsed::Partial => Parsed::Partial,
            Parsed::Invalid => Parsed::Complete(Request::UnknownAddress, bytes.len()),
            Parsed::Complete((host, port), length) => {
                let request = match (command, host) {
                    (1, Some(host)) if port != 0 => Request::Connect(Target { host, port }),
                    (1, _) => Request::UnknownAddress,
                    (3, _) => Request::Associate,
                    _ => Request::UnknownCommand,
                };
                Parsed::Complete(request, 3 + length)
            }
        },
        _ => Parsed::Partial,
    }
}

/// Reads address type, address and port. The host is `None` if the name is invalid.
fn destination(bytes: &[u8]) -> Parsed<(Option<Host>, u16)> {
    let (start, length) = match *bytes {
        [] => return Parsed::Partial,
        [1, ..] => (1, 4),
        [4, ..] => (1, 16),
        [3, length, ..] => (2, usize::from(length)),
        [3] => return Parsed::Partial,
        _ => return Parsed::Invalid,
    };
    let end = start + length;
    let Some(&[p0, p1]) = bytes.get(end..end + 2) else {
        return Parsed::Partial;
    };
    let address = &bytes[start..end];
    let host = if let Ok(octets) = <[u8; 4]>::try_from(address)
        && bytes[0] == 1
    {
        Some(Host::Address(Ipv4Addr::from(octets).into()))
    } else if let Ok(octets) = <[u8; 16]>::try_from(address)
        && bytes[0] == 4
    {
        // Some clients put IPv4 addresses into this form.
        Some(Host::Address(Ipv6Addr::from(octets).to_canonical()))
    } else {
        std::str::from_utf8(address).ok().and_then(Host::parse)
    };
    Parsed::Complete((host, u16::from_be_bytes([p0, p1])), end + 2)
}

/// The answer to a request that succeeded; `bound` is the address that the client uses from now on.
pub(crate) fn success(bound: SocketAddr) -> Vec<u8> {
    reply(0, bound)
}

/// The answer to a request that failed.
pub(crate) fn failure(failure: Failure) -> Vec<u8> {
    reply(
        match failure {
            Failure::Limit => 1,
            // RFC 1928 has no codes for an unknown name and for a timeout.
            Failure::Unreachable | Failure::UnknownName | Failure::TimedOut => 4,
            Failure::Refused => 5,
        },
        UNSPECIFIED,
    )
}

/// The answer to a command that is not supported.
pub(crate) fn unknown_command() -> Vec<u8> {
    reply(7, UNSPECIFIED)
}

/// The answer to an invalid address or an unknown address type.
pub(crate) fn unknown_address() -> Vec<u8> {
    reply(8, UNSPECIFIED)
}

const UNSPECIFIED: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

fn reply(code: u8, bound: SocketAddr) -> Vec<u8> {
    let mut bytes = vec![VERSION, code, 0];
    write_address(&mut bytes, bound);
    bytes
}

fn write_address(bytes: &mut Vec<u8>, address: SocketAddr) {
    // A socket that listens on `::` has IPv4 clients, whose addresses have the form of IPv6.
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => {
            bytes.push(1);
            bytes.extend(ip.octets());
        }
        IpAddr::V6(ip) => {
            bytes.push(4);
            bytes.extend(ip.octets());
        }
    }
    bytes.extend(address.port().to_be_bytes());
}

/// Reads the header of a client's UDP datagram (section 7). Returns the destination and the offset
/// of the payload; `None` for a fragment or an invalid header.
pub(crate) fn datagram(bytes: &[u8]) -> Option<(Target, usize)> {
    let [_, _, 0, address @ ..] = bytes else {
        return None;
    };
    match destination(address) {
        Parsed::Complete((Some(host), port), length) if port != 0 => {
            Some((Target { host, port }, 3 + length))
        }
        _ => None,
    }
}

/// Writes the header of a UDP datagram for a client.
pub(crate) fn write_datagram_header(bytes: &mut Vec<u8>, from: SocketAddr) {
    bytes.extend([0, 0, 0]);
    write_address(bytes, from);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(host: &str, port: u16) -> Target {
        let host = Host::parse(host).unwrap();
        Target { host, port }
    }

    /// The message of every prefix of `bytes` but the whole is partial.
    fn whole<T: PartialEq + std::fmt::Debug>(
        bytes: &[u8],
        parse: impl Fn(&[u8]) -> Parsed<T>,
    ) -> T {
        for cut in 0..bytes.len() {
            assert_eq!(parse(&bytes[..cut]), Parsed::Partial, "{cut}");
        }
        let mut more = bytes.to_vec();
        more.extend(b"early data");
        match parse(&more) {
            Parsed::Complete(message, length) if length == bytes.len() => message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn greetings_tell_the_methods() {
        assert!(whole(&[5, 2, 2, 0], greeting));
        assert!(!whole(&[5, 1, 2], greeting));
        assert!(!whole(&[5, 0], greeting));
        assert_eq!(greeting(&[4, 1, 0]), Parsed::Invalid);
        assert_eq!(greeting(b"GET / HTTP/1.1"), Parsed::Invalid);
    }

    #[test]
    fn requests_name_their_destination() {
        let v4 = [5, 1, 0, 1, 10, 0, 0, 1, 0, 80];
        assert_eq!(
            whole(&v4, request),
            Request::Connect(target("10.0.0.1", 80))
        );
        let mut v6 = vec![5, 1, 0, 4];
        v6.extend("fd00::1".parse::<Ipv6Addr>().unwrap().octets());
        v6.extend([1, 187]);
        assert_eq!(
            whole(&v6, request),
            Request::Connect(target("fd00::1", 443))
        );
        let name = b"\x05\x01\x00\x03\x04Db-1\x15\x38";
        assert_eq!(whole(name, request), Request::Connect(target("db-1", 5432)));
        let associate = [5, 3, 0, 1, 0, 0, 0, 0, 0, 0];
        assert_eq!(whole(&associate, request), Request::Associate);
    }

    #[test]
    fn hostile_requests_get_an_answer_and_no_more() {
        let bind = [5, 2, 0, 1, 10, 0, 0, 1, 0, 80];
        assert_eq!(whole(&bind, request), Request::UnknownCommand);
        for name in [
            &b"\x05\x01\x00\x03\x00\x00\x50"[..],
            b"\x05\x01\x00\x03\x02\xff\xfe\x00\x50",
            b"\x05\x01\x00\x03\x03a b\x00\x50",
            b"\x05\x01\x00\x01\x0a\x00\x00\x01\x00\x00",
        ] {
            assert_eq!(whole(name, request), Request::UnknownAddress, "{name:?}");
        }
        let Parsed::Complete(Request::UnknownAddress, _) = request(&[5, 1, 0, 9]) else {
            panic!()
        };
        assert_eq!(request(&[0; 10]), Parsed::Invalid);
    }

    #[test]
    fn answers_name_an_ipv4_address_as_such() {
        let bound = "[::ffff:10.0.0.1]:80".parse().unwrap();
        assert_eq!(success(bound), [5, 0, 0, 1, 10, 0, 0, 1, 0, 80]);
    }

    #[test]
    fn datagrams_carry_a_destination() {
        let bytes = [0, 0, 0, 1, 10, 0, 0, 1, 0, 53, 1, 2];
        assert_eq!(datagram(&bytes), Some((target("10.0.0.1", 53), 10)));
        let fragment = [0, 0, 1, 1, 10, 0, 0, 1, 0, 53, 1, 2];
        assert_eq!(datagram(&fragment), None);
        assert_eq!(datagram(&bytes[..9]), None);
    }

    proptest::proptest! {
        /// A message is the same whatever follows it, and is no longer than what was read.
        #[test]
        fn hostile_bytes_are_read_alike(
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300),
            start in 0usize..4,
        ) {
            let starts: [&[u8]; 4] = [&[], &[5, 1, 0, 3], &[5, 1, 0, 1], &[0, 0, 0, 3]];
            let bytes = [starts[start], &bytes].concat();
            let more = [&bytes[..], &[0; 8]].concat();
            if let Parsed::Complete(message, length) = request(&bytes) {
                proptest::prop_assert!(length <= bytes.len());
                match request(&more) {
                    Parsed::Complete(again, _) => proptest::prop_assert_eq!(again, message),
                    other => proptest::prop_assert!(false, "{:?}", other),
                }
            }
            if let Some((target, at)) = datagram(&bytes) {
                proptest::prop_assert!(at <= bytes.len() && target.port != 0);
                proptest::prop_assert_eq!(datagram(&more), Some((target, at)));
            }
            if let Parsed::Complete(_, length) = crate::http::request(&bytes) {
                proptest::prop_assert!(length <= bytes.len());
            }
        }
    }
}
