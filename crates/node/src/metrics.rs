//! Metrics for Prometheus: `GET /metrics` on a socket of its own, in the OpenMetrics text format.
//!
//! [`Dialogue`] is one scrape: a request of bounded length, then one family after the other, each sampled when
//! it is sent, so that packets are handled between them even with many peers. The connection ends with the
//! reply.

mod families;
mod gateway;
mod mesh;
mod userspace;

use crate::dialogue;
use crate::output::Output;
use crate::output::Phase;
use crate::subject::Subject;
use families::FAMILIES;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use std::fmt::Write;

/// Longest request in bytes, headers included.
const MAX_REQUEST: usize = 8192;
/// Maximum number of header lines.
const MAX_HEADERS: usize = 64;
/// Prefix of every metric's name.
const PREFIX: &str = "seikan";

/// One scrape.
#[derive(Debug, Default)]
pub struct Dialogue {
    state: State,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Waiting,
    /// The next family.
    Replying(usize),
    Over,
}

/// Target of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// The metrics.
    Metrics,
    /// The header only (HEAD).
    Head,
    /// An error, with its status.
    Other(&'static str),
    /// Incomplete.
    Unfinished,
}

impl dialogue::Dialogue for Dialogue {
    fn take(&mut self, input: &[u8], _: &mut Subject<'_>, output: &mut Output) -> usize {
        if !matches!(self.state, State::Waiting) {
            return 0;
        }
        let (status, next) = match parse(input) {
            Target::Unfinished => return 0,
            Target::Metrics => ("200 OK", State::Replying(0)),
            Target::Head => ("200 OK", State::Over),
            Target::Other(status) => (status, State::Over),
        };
        let good = status.starts_with("200");
        let kind = if good {
            "application/openmetrics-text; version=1.0.0; charset=utf-8"
        } else {
            "text/plain; charset=utf-8"
        };
        let _ = write!(
            output,
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n"
        );
        output.push(if status.starts_with("405") {
            b"Allow: GET, HEAD\r\n\r\n"
        } else {
            b"\r\n"
        });
        if !good {
            let _ = writeln!(output, "{status}: metrics are at /metrics");
        }
        self.state = next;
        // Input after the request is ignored: the connection ends with the reply.
        input.len()
    }

    fn give(&mut self, subject: &Subject<'_>, output: &mut Output) {
        let State::Replying(next) = self.state else {
            return;
        };
        self.state = if write_family(next, subject, output) {
            State::Replying(next + 1)
        } else {
            State::Over
        };
    }

    fn phase(&self) -> Phase {
        match self.state {
            State::Waiting => Phase::Idle,
            State::Replying(_) => Phase::Replying,
            State::Over => Phase::Over,
        }
    }
}

/// Writes a family of metrics, counted from 0, or the end of the text after the last one. Returns whether it was a
/// family.
pub(crate) fn write_family(index: usize, subject: &Subject<'_>, output: &mut impl Write) -> bool {
    let mut all = FAMILIES
        .iter()
        .chain(mesh::FAMILIES)
        .chain(gateway::FAMILIES)
        .chain(userspace::FAMILIES);
    // Writing to memory does not fail.
    let Some(family) = all.nth(index) else {
        let _ = text::encode_eof(output);
        return false;
    };
    let interface = ("interface".into(), subject.record.name.clone().into());
    let mut registry = Registry::with_prefix_and_labels(PREFIX, [interface].into_iter());
    registry.register_collector(Box::new(family.collect(subject)));
    let _ = text::encode_registry(output, &registry);
    true
}

fn parse(input: &[u8]) -> Target {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(input) {
        Err(httparse::Error::TooManyHeaders) => {
            Target::Other("431 Request Header Fields Too Large")
        }
        Err(_) => Target::Other("400 Bad Request"),
        Ok(httparse::Status::Partial) if input.len() >= MAX_REQUEST => {
            Target::Other("431 Request Header Fields Too Large")
        }
        Ok(httparse::Status::Partial) => Target::Unfinished,
        Ok(httparse::Status::Complete(_)) => {
            let path = request.path.unwrap_or_default();
            match (request.method, path.split('?').next()) {
                (Some("GET"), Some("/metrics")) => Target::Metrics,
                (Some("HEAD"), Some("/metrics")) => Target::Head,
                (Some("GET" | "HEAD"), _) => Target::Other("404 Not Found"),
                _ => Target::Other("405 Method Not Allowed"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::MetricType;

    #[test]
    fn requests_are_understood_or_refused() {
        let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").into_bytes();
        assert_eq!(parse(&get("/metrics")), Target::Metrics);
        assert_eq!(parse(&get("/metrics?a=b")), Target::Metrics);
        assert_eq!(parse(&get("/")), Target::Other("404 Not Found"));
        assert_eq!(parse(b"HEAD /metrics HTTP/1.0\r\n\r\n"), Target::Head);
        let post = parse(b"POST /metrics HTTP/1.1\r\n\r\n");
        assert_eq!(post, Target::Other("405 Method Not Allowed"));
        assert_eq!(parse(b"\x16\x03\x01\x02"), Target::Other("400 Bad Request"));
    }

    #[test]
    fn a_request_may_come_in_pieces_but_not_without_end() {
        assert_eq!(parse(b"GET /metrics HTTP/1.1\r\nHost"), Target::Unfinished);
        let mut endless = b"GET /metrics HTTP/1.1\r\nHost: ".to_vec();
        endless.resize(MAX_REQUEST, b'a');
        let refused = Target::Other("431 Request Header Fields Too Large");
        assert_eq!(parse(&endless), refused);
        let many = format!("GET /metrics HTTP/1.1\r\n{}", "a: b\r\n".repeat(65));
        assert_eq!(parse(many.as_bytes()), refused);
    }

    /// Line in docs/reference/metrics.md above the generated part.
    const MARK: &str = "<!-- generated from the program; `make golden` writes it anew -->\n";

    #[test]
    fn the_page_of_metrics_lists_every_family() {
        let families = FAMILIES
            .iter()
            .chain(mesh::FAMILIES)
            .chain(gateway::FAMILIES)
            .chain(userspace::FAMILIES);
        let mut table = "\n| metric | type | meaning |\n|---|---|---|\n".to_owned();
        for family in families {
            let (suffix, kind) = match family.kind {
                MetricType::Counter => ("_total", "counter"),
                MetricType::Info => ("_info", "info"),
                MetricType::Histogram => ("", "histogram"),
                MetricType::Gauge => ("", "gauge"),
                MetricType::Unknown => ("", "unknown"),
            };
            let (name, help) = (family.name, family.help);
            let _ = writeln!(table, "| `{PREFIX}_{name}{suffix}` | {kind} | {help} |");
        }
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/reference/metrics.md"
        );
        let page = std::fs::read_to_string(path).expect("the page");
        let (introduction, shown) = page.split_once(MARK).expect("the mark");
        if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
            let page = format!("{introduction}{MARK}{table}");
            return std::fs::write(path, page).expect("written");
        }
        assert!(shown == table, "{path} is stale: run `make golden`");
    }
}
