//! Web proxies, for networks that pass only HTTP. Connections to coordinators and relays go through `CONNECT`
//! (RFC 9110, section 9.3.6). TLS inside of it verifies the server as without a proxy.
//!
//! As in curl, the environment names the proxy and its exceptions: `HTTPS_PROXY`, else `ALL_PROXY`, and
//! `NO_PROXY`, each also in lower case, which precedes.

use crate::causes::causes;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper::header::{HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, WWW_AUTHENTICATE};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tower_service::Service;

/// Timeout of the TCP connection to a proxy, including the resolution of its name.
const CONNECT_WITHIN: Duration = Duration::from_secs(4);
/// Timeout of a proxy's answer. Before it, the proxy resolves the server's name and connects to the server.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Timeout of a connection through a proxy.
pub(crate) const THROUGH_WITHIN: Duration = CONNECT_WITHIN.saturating_add(ANSWER_WITHIN);
/// Maximum size of the answer's head in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Port of a proxy whose URL has none, as in Go and in Rust's clients. curl uses 1080.
const DEFAULT_PORT: u16 = 80;

/// Why there is no connection through a proxy.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The variable has no URL of a proxy.
    #[error(
        "cannot use the web proxy in {variable}: it is no URL such as http://proxy.example.com:3128; write special \
         characters of a user name or password as %XX"
    )]
    Malformed {
        /// The environment variable.
        variable: &'static str,
    },
    /// The proxy has another protocol.
    #[error("cannot use the proxy in {variable}: only http:// is supported, not {scheme}://")]
    Scheme {
        /// The environment variable.
        variable: &'static str,
        /// The scheme of its URL.
        scheme: String,
    },
    /// The proxy cannot be reached.
    #[error("cannot reach web proxy {proxy}: {reason}; check HTTPS_PROXY and NO_PROXY")]
    Unreachable {
        /// Its host and port.
        proxy: String,
        /// The reason, including its causes.
        reason: String,
    },
    /// Its answer is not one of HTTP, is too long, or comes too late.
    #[error(
        "web proxy {proxy} gives no valid answer: {reason}; check that HTTPS_PROXY names an HTTP proxy"
    )]
    Answer {
        /// Its host and port.
        proxy: String,
        /// The reason, including its causes.
        reason: String,
    },
    /// The proxy wants other credentials.
    #[error("web proxy {proxy} {} (status {status})", .problem.text())]
    Credentials {
        /// Its host and port.
        proxy: String,
        /// Fault of the credentials in use.
        problem: Credentials,
        /// Status code of HTTP.
        status: u16,
    },
    /// The proxy refuses the connection.
    #[error(
        "web proxy {proxy} refuses connections to {server} (status {status}); have its administrator allow CONNECT to \
         this host and port, or list the host in NO_PROXY if no proxy is needed"
    )]
    Refused {
        /// Its host and port.
        proxy: String,
        /// Host and port of the server.
        server: String,
        /// Status code of HTTP.
        status: u16,
    },
    /// The proxy fails to connect to the server.
    #[error("web proxy {proxy} cannot reach {server} (status {status}); check this host and port")]
    Server {
        /// Its host and port.
        proxy: String,
        /// Host and port of the server.
        server: String,
        /// Status code of HTTP.
        status: u16,
    },
}

/// Problem of the credentials for a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// The URL has none.
    Missing,
    /// The proxy does not accept those in the URL.
    Wrong,
    /// The proxy has no basic authentication.
    NotBasic,
}

impl Credentials {
    fn text(self) -> &'static str {
        match self {
            Self::Missing => {
                "requires a user name and a password: set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
            }
            Self::Wrong => {
                "rejects the user name or password: correct them in HTTPS_PROXY, special characters as %XX"
            }
            Self::NotBasic => {
                "offers no basic authentication, and no other is supported: have its administrator allow this host \
                 without"
            }
        }
    }
}

/// The proxy of the environment, and the hosts that are reached without it. The default is no proxy.
#[derive(Clone, Debug, Default)]
pub struct WebProxies(Option<Arc<Matcher>>);

impl WebProxies {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// [`ProxyError::Malformed`] or [`ProxyError::Scheme`]. No error contains the value, which may hold a
    /// password.
    pub fn from_env() -> Result<WebProxies, ProxyError> {
        // A value that is not UTF-8 is malformed, rather than absent.
        Self::from_vars(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<WebProxies, ProxyError> {
        // In CGI programs, where upper-case HTTP_PROXY is a header of the request, the library ignores all; these
        // names are safe.
        let first = |names: [&'static str; 2]| {
            let value = |name| Some((name, get(name).filter(|value| !value.is_empty())?));
            names.into_iter().find_map(value)
        };
        let proxy = first(["https_proxy", "HTTPS_PROXY"]);
        let Some((variable, url)) = proxy.or_else(|| first(["all_proxy", "ALL_PROXY"])) else {
            return Ok(WebProxies::default());
        };
        let exceptions = first(["no_proxy", "NO_PROXY"]).unwrap_or_default().1;
        let exceptions: Vec<&str> = exceptions
            .split(|c: char| c == ',' || c.is_whitespace())
            .collect();
        // For the library, this matches names only.
        if exceptions.contains(&"*") {
            return Ok(WebProxies::default());
        }
        let any = Matcher::builder().https(&url).build();
        let found = any.intercept(&Uri::from_static("https://any"));
        let malformed = ProxyError::Malformed { variable };
        let Some(found) = found else {
            return Err(malformed);
        };
        match found.uri().scheme_str() {
            _ if !is_host_and_port(&url, found.uri()) => Err(malformed),
            Some("http") => {
                let exceptions = exceptions.join(",");
                let matcher = Matcher::builder().https(url).no(exceptions).build();
                Ok(WebProxies(Some(Arc::new(matcher))))
            }
            scheme => Err(ProxyError::Scheme {
                variable,
                scheme: scheme.unwrap_or_default().to_owned(),
            }),
        }
    }

    /// Returns the proxy for connections to the server of this URL.
    pub fn of_url(&self, url: &str) -> Option<WebProxy> {
        self.of(&url.parse().ok()?)
    }

    /// Returns the proxy for connections to a server, given as https://HOST:PORT.
    pub(crate) fn of(&self, server: &Uri) -> Option<WebProxy> {
        self.0.as_ref()?.intercept(server).map(WebProxy)
    }
}

/// Whether nothing but a host and a port is left of the URL of a proxy without its credentials. Otherwise a special
/// character of the password has split it, and its beginning would be taken for a host.
fn is_host_and_port(url: &str, without_credentials: &Uri) -> bool {
    let after_scheme = url.split_once("://").map_or(url, |(_, rest)| rest);
    let no_path = !after_scheme.trim_end_matches('/').contains(['/', '?', '#']);
    let authority = without_credentials.authority();
    no_path
        && authority.is_some_and(|authority| match authority.port_u16() {
            Some(port) => authority.as_str() == format!("{}:{port}", authority.host()),
            None => authority.as_str() == authority.host(),
        })
}

/// A proxy. It is displayed as host and port, without credentials.
#[derive(Clone, Debug)]
pub struct WebProxy(Intercept);

impl fmt::Display for WebProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let uri = self.0.uri();
        let (host, port) = (uri.host().unwrap_or_default(), uri.port_u16());
        write!(f, "{host}:{}", port.unwrap_or(DEFAULT_PORT))
    }
}

impl WebProxy {
    /// Connects to a server, given as https://HOST:PORT, through the proxy, which resolves the
    /// server's name. `http` makes the connection to the proxy.
    ///
    /// # Errors
    /// All variants except those that [`WebProxies::from_env`] returns.
    pub(crate) async fn connect(
        &self,
        mut http: HttpConnector,
        server: &Uri,
    ) -> Result<TokioIo<TcpStream>, ProxyError> {
        let unreachable = |reason| ProxyError::Unreachable {
            proxy: self.to_string(),
            reason,
        };
        let connected = tokio::time::timeout(CONNECT_WITHIN, http.call(self.0.uri().clone()));
        let stream = match connected.await {
            Ok(connected) => connected.map_err(|error| unreachable(causes(&error)))?,
            Err(_) => {
                let seconds = CONNECT_WITHIN.as_secs();
                return Err(unreachable(format!("no connection within {seconds} s")));
            }
        };
        let answered = tokio::time::timeout(ANSWER_WITHIN, self.request(stream, server));
        answered.await.unwrap_or_else(|_| {
            let seconds = ANSWER_WITHIN.as_secs();
            Err(self.invalid(format!("none within {seconds} s")))
        })
    }

    async fn request(
        &self,
        stream: TokioIo<TcpStream>,
        server: &Uri,
    ) -> Result<TokioIo<TcpStream>, ProxyError> {
        let failed = |error: hyper::Error| self.invalid(causes(&error));
        let (mut requests, connection) = http1::Builder::new()
            .max_buf_size(MAX_HEAD)
            .handshake(stream)
            .await
            .map_err(failed)?;
        let host = server.host().unwrap_or_default();
        let server = format!("{host}:{}", server.port_u16().unwrap_or(443));
        let mut request = Request::connect(&server).header(HOST, &server);
        if let Some(authorization) = self.0.basic_auth() {
            request = request.header(PROXY_AUTHORIZATION, authorization);
        }
        let request = request.body(Empty::<Bytes>::new());
        let request = request.map_err(|error| self.invalid(causes(&error)))?;
        let answer = async {
            let answer = requests.send_request(request).await.map_err(failed)?;
            if answer.status().is_success() {
                Ok(())
            } else {
                Err(self.refusal(server, &answer))
            }
        };
        // The connection ends by the switch to another protocol.
        let ends = async { connection.without_shutdown().await.map_err(failed) };
        let ((), parts) = tokio::try_join!(answer, ends)?;
        // A server of TLS waits for its client.
        if parts.read_buf.is_empty() {
            Ok(parts.io)
        } else {
            Err(self.invalid("it sends data before the server can have any".to_owned()))
        }
    }

    fn invalid(&self, reason: String) -> ProxyError {
        ProxyError::Answer {
            proxy: self.to_string(),
            reason,
        }
    }

    /// Returns the error of an answer other than success. Nothing of its text is repeated.
    fn refusal<B>(&self, server: String, answer: &Response<B>) -> ProxyError {
        let (proxy, status) = (self.to_string(), answer.status());
        // tinyproxy answers wrong credentials as a server would, with 401.
        if let StatusCode::PROXY_AUTHENTICATION_REQUIRED | StatusCode::UNAUTHORIZED = status {
            // One line may offer several schemes (RFC 9110, section 11.6.1).
            let is_basic = |offer: &[u8]| {
                offer.split(|byte| *byte == b',').any(|part| {
                    let mut words = part.trim_ascii().split(u8::is_ascii_whitespace);
                    words
                        .next()
                        .is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"basic"))
                })
            };
            let offers = [PROXY_AUTHENTICATE, WWW_AUTHENTICATE];
            let mut offers = offers
                .iter()
                .flat_map(|name| answer.headers().get_all(name));
            let problem = if !offers.any(|offer| is_basic(offer.as_bytes())) {
                Credentials::NotBasic
            } else if self.0.basic_auth().is_some() {
                Credentials::Wrong
            } else {
                Credentials::Missing
            };
            let status = status.as_u16();
            return ProxyError::Credentials {
                proxy,
                problem,
                status,
            };
        }
        let of_server = status.is_server_error();
        let status = status.as_u16();
        if of_server {
            ProxyError::Server {
                proxy,
                server,
                status,
            }
        } else {
            ProxyError::Refused {
                proxy,
                server,
                status,
            }
        }
    }
}

/// Connects to servers of HTTPS, through a proxy if there is one for them.
#[derive(Clone)]
pub(crate) struct Connector {
    pub http: HttpConnector,
    pub web_proxies: WebProxies,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.http.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, server: Uri) -> Self::Future {
        match self.web_proxies.of(&server) {
            None => {
                let connecting = self.http.call(server);
                Box::pin(async { Ok(connecting.await?) })
            }
            Some(proxy) => {
                let http = self.http.clone();
                Box::pin(async move { Ok(proxy.connect(http, &server).await?) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream as Socket};
    use tokio::net::TcpSocket;

    type Variables<'a> = &'a [(&'a str, &'a str)];

    /// The environment of these variables.
    fn environment(variables: Variables) -> Result<WebProxies, ProxyError> {
        let get = |name: &str| variables.iter().find(|(known, _)| *known == name);
        WebProxies::from_vars(|name| get(name).map(|(_, value)| (*value).to_owned()))
    }

    fn of(variables: Variables, url: &str) -> Option<String> {
        let proxies = environment(variables).expect("a proxy");
        proxies.of_url(url).map(|proxy| proxy.to_string())
    }

    #[test]
    fn the_environment_names_the_proxy_as_for_curl() {
        // curl(1), section ENVIRONMENT: lower case precedes; a variable without value counts as unset.
        let cases: [(Variables, Option<&str>); 11] = [
            (&[], None),
            (
                &[("HTTP_PROXY", "http://a:1"), ("http_proxy", "http://b:1")],
                None,
            ),
            (&[("HTTPS_PROXY", "http://a:1")], Some("a:1")),
            (&[("https_proxy", "http://a:1")], Some("a:1")),
            (
                &[("HTTPS_PROXY", "http://a:1"), ("https_proxy", "http://b:1")],
                Some("b:1"),
            ),
            (&[("ALL_PROXY", "http://a:1")], Some("a:1")),
            (
                &[("all_proxy", "http://a:1"), ("HTTPS_PROXY", "http://b:1")],
                Some("b:1"),
            ),
            (
                &[("all_proxy", "http://a:1"), ("HTTPS_PROXY", "")],
                Some("a:1"),
            ),
            (&[("HTTPS_PROXY", "a:1")], Some("a:1")),
            (&[("HTTPS_PROXY", "http://a")], Some("a:80")),
            (
                &[("HTTPS_PROXY", "http://u:p@[2001:db8::1]:3128/")],
                Some("[2001:db8::1]:3128"),
            ),
        ];
        for (variables, proxy) in cases {
            let found = of(variables, "https://hub.example.org:7443");
            assert_eq!(found.as_deref(), proxy, "{variables:?}");
        }
    }

    #[test]
    fn no_proxy_lists_hosts_as_for_curl() {
        // CURLOPT_NOPROXY(3) and curl(1), section ENVIRONMENT.
        let cases = [
            ("ample.com", "ample.com", true),
            ("ample.com", "ample.com:80", true),
            ("ample.com", "www.ample.com", true),
            ("ample.com", "www.example.com", false),
            ("local.com", "www.notlocal.com", false),
            (".example.com", "www.example.com", true),
            (".example.com", "foo.example.com", true),
            ("EXAMPLE.com", "example.COM", true),
            ("", "example.com", false),
            ("*", "example.com", true),
            ("*", "192.0.2.1", true),
            ("a.test,b.test", "b.test", true),
            ("a.test, b.test", "b.test", true),
            ("a.test b.test", "b.test", true),
            ("192.168.0.1", "192.168.0.1:7443", true),
            ("192.168.0.1", "192.168.0.10", false),
            ("192.168.0.0/16", "192.168.3.4", true),
            ("192.168.0.0/16", "192.169.3.4", false),
            ("2001:db8::/32", "[2001:db8::7]:443", true),
            ("::1", "[::1]", true),
            ("168.0.1", "192.168.0.1", false),
        ];
        for (list, host, is_listed) in cases {
            let variables = [("HTTPS_PROXY", "http://proxy:1"), ("NO_PROXY", list)];
            let found = of(&variables, &format!("https://{host}"));
            assert_eq!(found.is_none(), is_listed, "{list}: {host}");
        }
    }

    #[test]
    fn an_unusable_proxy_is_an_error_without_its_password() {
        for url in [
            "http://jo:se#cret@proxy:1",
            "http://jo:se/cret@proxy:1",
            "http://jo:1#cret@proxy:1",
            "http://jo:1/cret@proxy:1",
            "http://jo:1?cret@proxy:1",
            "http://jo:se@cret@proxy:1",
            "http://jo:se cret@proxy:1",
            "ftp://jo:secret@proxy:1",
            "http://jo:secret@proxy:99999",
            "https://jo:secret@proxy:1",
            "socks5h://jo:secret@proxy:1",
            "\u{fffd}",
        ] {
            let error = environment(&[("ALL_PROXY", url)]).expect_err(url);
            let shown = format!("{error} {error:?}");
            assert!(shown.contains("ALL_PROXY"), "{url}: {shown}");
            for part in ["jo", "cret"] {
                assert!(!shown.contains(part), "{url}: {shown}");
            }
        }
    }

    #[test]
    fn neither_debug_nor_display_shows_credentials() {
        let proxies = environment(&[("HTTPS_PROXY", "http://me:se%23cret@proxy:1")]);
        let proxies = proxies.expect("a proxy");
        let proxy = proxies.of_url("https://hub").expect("a proxy");
        let shown = format!("{proxies:?} {proxy:?} {proxy}");
        // printf %s 'me:se#cret' | base64
        for secret in ["cret", "bWU6c2UjY3JldA=="] {
            assert!(!shown.contains(secret), "{shown}");
        }
        let sent = proxy.0.basic_auth().expect("credentials");
        assert_eq!(sent, "Basic bWU6c2UjY3JldA==");
    }

    const SERVER: &str = "https://hub.example.org:7443";

    /// Connects to [`SERVER`] through a proxy that reads the request and does this. Returns the request as well.
    fn through(
        credentials: &str,
        proxy: impl FnOnce(&mut Socket) + Send + 'static,
    ) -> (Result<TokioIo<TcpStream>, ProxyError>, Vec<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("an address");
        let proxies = environment(&[("https_proxy", &format!("http://{credentials}{address}"))]);
        let served = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().expect("accepted");
            let lines = BufReader::new(&socket)
                .lines()
                .map(|line| line.expect("a line"));
            let request = lines.take_while(|line| !line.is_empty()).collect();
            proxy(&mut socket);
            request
        });
        let server = Uri::from_static(SERVER);
        let found = proxies.expect("a proxy").of(&server).expect("a proxy");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let connected = runtime
            .expect("a runtime")
            .block_on(found.connect(HttpConnector::new(), &server));
        (connected, served.join().expect("served"))
    }

    fn say(text: &'static str) -> impl FnOnce(&mut Socket) + Send + 'static {
        // The client may close first.
        move |socket| drop(socket.write_all(text.as_bytes()))
    }

    #[test]
    fn a_connection_through_a_proxy_carries_bytes() {
        let (connected, request) = through("me:secret@", |socket| {
            let answer = "HTTP/1.1 200 Connection established\r\nProxy-Agent: test\r\n\r\n";
            socket.write_all(answer.as_bytes()).expect("written");
        });
        assert_eq!(request[0], "CONNECT hub.example.org:7443 HTTP/1.1");
        let has = |line: &str| request.iter().any(|other| other.eq_ignore_ascii_case(line));
        assert!(has("host: hub.example.org:7443"), "{request:?}");
        // printf %s me:secret | base64
        assert!(
            has("proxy-authorization: Basic bWU6c2VjcmV0"),
            "{request:?}"
        );
        let socket = connected.expect("connected").into_inner().into_std();
        let mut socket = socket.expect("a socket");
        socket.set_nonblocking(false).expect("set");
        let mut rest = Vec::new();
        socket.read_to_end(&mut rest).expect("the end");
        assert_eq!(rest, b"");
    }

    #[test]
    fn a_refusal_says_what_to_check() {
        let cases = [
            (
                "",
                "407 X\r\nProxy-Authenticate: Basic realm=\"x\"",
                "requires a user name",
            ),
            (
                "me:secret@",
                "407 X\r\nproxy-authenticate: basic",
                "rejects the user name",
            ),
            (
                "me:secret@",
                "401 X\r\nWWW-Authenticate: Basic realm=\"x\"",
                "rejects the user name",
            ),
            (
                "",
                "407 X\r\nProxy-Authenticate: Negotiate, Basic realm=\"x\"",
                "requires a user name",
            ),
            (
                "me:secret@",
                "407 X\r\nProxy-Authenticate: NTLM",
                "no basic authentication",
            ),
            (
                "me:secret@",
                "407 X\r\nProxy-Authenticate: Basically realm=\"basic\"",
                "no basic authentication",
            ),
            ("me:secret@", "403 X", "allow CONNECT to this host and port"),
            (
                "me:secret@",
                "302 X\r\nLocation: http://elsewhere",
                "status 302",
            ),
            (
                "me:secret@",
                "503 X",
                "cannot reach hub.example.org:7443 (status 503)",
            ),
        ];
        for (credentials, answer, text) in cases {
            let (connected, _) = through(credentials, move |socket| {
                let rest = "Content-Length: 1000000\r\n\r\n<html>";
                let _ = socket.write_all(format!("HTTP/1.1 {answer}\r\n{rest}").as_bytes());
            });
            let error = connected.expect_err(answer).to_string();
            assert!(error.contains(text), "{answer}: {error}");
            assert!(error.starts_with("web proxy 127.0.0.1:"), "{error}");
            assert!(
                !error.contains("secret") && !error.contains("bWU6"),
                "{error}"
            );
        }
    }

    #[test]
    fn an_answer_that_is_not_http_is_an_error() {
        let cases = [
            ("", "closed"),
            ("HTTP/1.1 200 OK\r\n", "closed"),
            ("SSH-2.0-OpenSSH_9.2p1\r\n", "invalid HTTP"),
            ("\u{1}\u{2}\u{3}\0\0\r\n\r\n", "invalid HTTP"),
            ("HTTP/1.1 200 OK\r\n\r\nearly", "sends data before"),
        ];
        for (answer, text) in cases {
            let error = through("", say(answer)).0.expect_err(answer).to_string();
            assert!(error.contains(text), "{answer:?}: {error}");
        }
    }

    #[test]
    fn a_head_without_end_is_refused_at_its_limit() {
        let head = |length: usize| format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "y".repeat(length));
        let short = through("", move |socket| {
            drop(socket.write_all(head(8000).as_bytes()))
        });
        short.0.expect("a head of 8 kB is accepted");
        for part in [head(MAX_HEAD), "X: y\r\n".to_owned(), "y".repeat(100)] {
            let (connected, _) = through("", move |socket| {
                let mut sent = socket.write_all(b"HTTP/1.1 200 OK\r\nX: ");
                // Until the client closes.
                while sent.is_ok() {
                    sent = socket.write_all(part.as_bytes());
                }
            });
            let error = connected.expect_err("too long").to_string();
            assert!(error.contains("too large"), "{error}");
        }
    }

    #[test]
    fn a_proxy_that_accepts_no_connection_is_unreachable() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let connected = runtime.expect("a runtime").block_on(async {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.bind((Ipv4Addr::LOCALHOST, 0).into()).expect("bound");
            let listener = socket.listen(1).expect("listens");
            let address = listener.local_addr().expect("an address");
            // With a full queue, the kernel drops further requests.
            let within = Duration::from_millis(200);
            let queue = std::iter::from_fn(|| Socket::connect_timeout(&address, within).ok());
            let _queue: Vec<Socket> = queue.collect();
            let proxies = environment(&[("https_proxy", &address.to_string())]);
            let server = Uri::from_static(SERVER);
            let found = proxies.expect("a proxy").of(&server).expect("a proxy");
            found.connect(HttpConnector::new(), &server).await
        });
        let error = connected.expect_err("no connection").to_string();
        assert!(error.starts_with("cannot reach web proxy"), "{error}");
        assert!(error.contains("no connection within"), "{error}");
    }

    #[test]
    fn a_proxy_has_time_to_connect_to_a_distant_server() {
        let (connected, _) = through("", |socket| {
            std::thread::sleep(CONNECT_WITHIN + Duration::from_secs(1));
            let _ = socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        });
        connected.expect("a late answer is accepted");
    }

    #[test]
    fn a_proxy_that_keeps_a_client_waiting_is_given_up() {
        let slowly = |text: &'static str| {
            move |socket: &mut Socket| {
                // Until the client closes.
                for byte in text.bytes().cycle() {
                    std::thread::sleep(Duration::from_millis(5));
                    if socket.write_all(&[byte]).is_err() {
                        return;
                    }
                }
                let _ = socket.read(&mut [0]);
            }
        };
        std::thread::scope(|scope| {
            for text in ["", "HTTP/1.1 100 Continue\r\n\r\n", "H"] {
                scope.spawn(move || {
                    let error = through("", slowly(text))
                        .0
                        .expect_err("too late")
                        .to_string();
                    assert!(error.contains("no valid answer"), "{text}: {error}");
                });
            }
        });
    }
}
