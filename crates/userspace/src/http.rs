//! HTTP CONNECT (RFC 9110 section 9.3.6): the head of a request, and the answers.

use crate::socks::Parsed;
use crate::target::{Failure, Target};

/// An answer with a status and a sentence, after which the connection is closed.
macro_rules! refusal {
    ($status:literal, $sentence:literal) => {
        concat!(
            "HTTP/1.1 ",
            $status,
            "\r\nConnection: close\r\nContent-Type: text/plain\r\n\r\n",
            $sentence,
            "\n"
        )
    };
}

/// Maximum length of the head of a request, in bytes.
pub(crate) const MAX_HEAD: usize = 8192;
/// Maximum number of header fields of a request.
const MAX_FIELDS: usize = 64;

/// The answer to a request that succeeded.
pub(crate) const SUCCESS: &str = "HTTP/1.1 200 Connection established\r\n\r\n";
/// The answer to bytes that are not a request.
pub(crate) const BAD_REQUEST: &str =
    refusal!("400 Bad Request", "the request is not valid HTTP/1.1");
/// The answer to a head that is too long.
pub(crate) const TOO_LONG: &str = refusal!(
    "431 Request Header Fields Too Large",
    "the head of the request is too long"
);

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// CONNECT.
    Connect(Target),
    /// CONNECT with an invalid destination.
    BadTarget,
    /// Another method.
    OtherMethod,
    /// More header fields than are read.
    TooManyFields,
}

/// Reads the head of a request.
pub(crate) fn request(bytes: &[u8]) -> Parsed<Request> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut head = httparse::Request::new(&mut fields);
    let length = match head.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Parsed::Partial,
        Err(httparse::Error::TooManyHeaders) => {
            return Parsed::Complete(Request::TooManyFields, bytes.len());
        }
        Err(_) => return Parsed::Invalid,
    };
    let target = head.path.and_then(Target::parse_authority);
    let request = match (head.method, target) {
        (Some("CONNECT"), Some(target)) => Request::Connect(target),
        (Some("CONNECT"), None) => Request::BadTarget,
        _ => Request::OtherMethod,
    };
    Parsed::Complete(request, length)
}

/// The answer to a request that failed.
pub(crate) fn failure(failure: Failure) -> &'static str {
    match failure {
        Failure::Refused => refusal!("502 Bad Gateway", "the destination refused the connection"),
        Failure::Unreachable => refusal!("502 Bad Gateway", "there is no path to the destination"),
        Failure::UnknownName => refusal!("502 Bad Gateway", "the name is unknown in this network"),
        Failure::TimedOut => refusal!("504 Gateway Timeout", "the destination does not answer"),
        Failure::Limit => refusal!(
            "503 Service Unavailable",
            "the limit of connections is reached"
        ),
    }
}

/// The answer to another method.
pub(crate) const OTHER_METHOD: &str = concat!(
    "HTTP/1.1 405 Method Not Allowed\r\nAllow: CONNECT\r\nConnection: close\r\n",
    "Content-Type: text/plain\r\n\r\nonly CONNECT is supported\n"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_names_its_destination_and_leaves_early_data() {
        let head = b"CONNECT db-1:5432 HTTP/1.1\r\nHost: db-1:5432\r\n\r\n";
        for cut in 0..head.len() {
            assert_eq!(request(&head[..cut]), Parsed::Partial, "{cut}");
        }
        let mut more = head.to_vec();
        more.extend([22, 3, 1]);
        let target = Target::parse_authority("db-1:5432").unwrap();
        assert_eq!(
            request(&more),
            Parsed::Complete(Request::Connect(target), head.len())
        );
    }

    #[test]
    fn other_requests_are_told_apart() {
        for (text, expected) in [
            ("GET http://db-1/ HTTP/1.1\r\n\r\n", Request::OtherMethod),
            ("CONNECT /index HTTP/1.1\r\n\r\n", Request::BadTarget),
            ("CONNECT db-1 HTTP/1.1\r\n\r\n", Request::BadTarget),
        ] {
            assert_eq!(
                request(text.as_bytes()),
                Parsed::Complete(expected, text.len()),
                "{text}"
            );
        }
        for text in ["\u{0}\u{1}\r\n\r\n", "CONNECT a:1 HTTP/9\r\n\r\n"] {
            assert_eq!(request(text.as_bytes()), Parsed::Invalid, "{text}");
        }
        let many = format!(
            "CONNECT a:1 HTTP/1.1\r\n{}\r\n",
            "A: b\r\n".repeat(MAX_FIELDS + 1)
        );
        let length = many.len();
        assert_eq!(
            request(many.as_bytes()),
            Parsed::Complete(Request::TooManyFields, length)
        );
    }
}
