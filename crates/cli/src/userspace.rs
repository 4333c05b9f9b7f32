//! Options of a tunnel without root.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::bail;
use clap::Args;
use seikan_config::{Diagnostic, Severity};
use seikan_node::control::{ControlError, RuntimeDirs};
use seikan_node::userspace::Services;
use seikan_userspace::{Exposed, Forward, Listener, Service, Transport};

/// Options of a tunnel without root.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Without root")]
pub struct UserspaceArguments {
    /// Run without root and without an interface; needs at least one of the options below
    #[arg(long)]
    userspace: bool,
    /// Serve SOCKS5 into the tunnel on this port (repeatable) [default address: 127.0.0.1]
    #[arg(long, value_name = "[ADDR:]PORT", requires = "userspace", value_parser = listening_address)]
    socks: Vec<SocketAddr>,
    /// Serve HTTP CONNECT into the tunnel on this port (repeatable) [default address: 127.0.0.1]
    #[arg(long, value_name = "[ADDR:]PORT", requires = "userspace", value_parser = listening_address)]
    http: Vec<SocketAddr>,
    /// Forward a port of this host to a host inside the tunnel, e.g. 8080:db-1:5432 (repeatable)
    #[arg(
        long,
        value_name = "[ADDR:]PORT:HOST:PORT[/udp]",
        requires = "userspace"
    )]
    forward: Vec<Forward>,
    /// Let the inside of the tunnel reach a port of this host, e.g. 22 or 80:8080 (repeatable)
    #[arg(long, value_name = "PORT[:[ADDR:]PORT][/udp]", requires = "userspace")]
    expose: Vec<Exposed>,
}

/// Parses a port, on 127.0.0.1, or an address with a port.
fn listening_address(text: &str) -> Result<SocketAddr, String> {
    let port = |text: &str| Some(SocketAddr::from((Ipv4Addr::LOCALHOST, text.parse().ok()?)));
    let address = port(text).or_else(|| text.parse().ok());
    address.ok_or_else(|| {
        "expected a port or an IP address with a port, e.g. 1080 or [::1]:1080".to_owned()
    })
}

impl UserspaceArguments {
    /// Returns the services; `None` if the tunnel has an interface.
    ///
    /// # Errors
    /// There is no service, so nothing could use the tunnel.
    pub fn services(&self) -> anyhow::Result<Option<Services>> {
        if !self.userspace {
            return Ok(None);
        }
        let services = Services {
            socks: self.socks.clone(),
            http: self.http.clone(),
            forwards: self.forward.clone(),
            exposed: self.expose.clone(),
        };
        if services == Services::default() {
            bail!(
                "cannot run without root and without a port: nothing could use the tunnel; add --socks, --http, \
                 --forward or --expose"
            );
        }
        Ok(Some(services))
    }

    /// Returns the directories of the tunnel's sockets and state.
    ///
    /// # Errors
    /// This user has none.
    pub fn dirs(&self) -> Result<RuntimeDirs, ControlError> {
        if self.userspace {
            RuntimeDirs::for_user()
        } else {
            Ok(RuntimeDirs::default())
        }
    }

    /// Returns a warning for each port that other hosts may reach.
    pub fn warnings(&self) -> impl Iterator<Item = Diagnostic> {
        let warning = |option: &str, address: SocketAddr| {
            let message = format!("other hosts may use {address} as well: it asks for no password");
            let warning = Diagnostic::new(Severity::Warning, option, message);
            warning.with_help("listen on 127.0.0.1, or limit it by a firewall")
        };
        let socks = self.socks.iter().map(|address| ("--socks", *address));
        let http = self.http.iter().map(|address| ("--http", *address));
        let forwards = self
            .forward
            .iter()
            .map(|forward| ("--forward", forward.listen));
        let all = socks.chain(http).chain(forwards);
        all.filter(|(_, address)| !is_loopback(address.ip()))
            .map(move |(option, address)| warning(option, address))
    }

    /// Returns these options as words of a command line.
    pub fn words(&self) -> Vec<OsString> {
        let with = |option: &str, value: String| OsString::from(format!("{option}={value}"));
        let flag = self.userspace.then(|| OsString::from("--userspace"));
        let socks = self.socks.iter().map(|at| with("--socks", at.to_string()));
        let http = self.http.iter().map(|at| with("--http", at.to_string()));
        let forwards = self
            .forward
            .iter()
            .map(|it| with("--forward", it.to_string()));
        let exposed = self
            .expose
            .iter()
            .map(|it| with("--expose", it.to_string()));
        let words = flag.into_iter().chain(socks).chain(http);
        words.chain(forwards).chain(exposed).collect()
    }
}

/// An IPv4 address in IPv6 is reached over IPv4.
fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Returns the name of a listening port and its address.
pub fn describe(listener: &Listener) -> String {
    let service = match listener.service {
        Service::Socks => "SOCKS5",
        Service::Http => "HTTP CONNECT",
        Service::Forward | Service::Exposed | Service::Own => "forward",
    };
    let transport = match listener.transport {
        Transport::Tcp => "",
        Transport::Udp => "/udp",
    };
    format!("{service} {}{transport}", listener.address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        userspace: UserspaceArguments,
    }

    fn parsed(words: &[&str]) -> Result<UserspaceArguments, String> {
        let words = ["up"].iter().chain(words);
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        Ok(line.userspace)
    }

    #[test]
    fn a_port_alone_is_on_loopback() {
        let words = [
            "--userspace",
            "--socks",
            "1080",
            "--socks=[::1]:1081",
            "--http=0.0.0.0:80",
        ];
        let services = parsed(&words)
            .expect("parsed")
            .services()
            .expect("services");
        let services = services.expect("without root");
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        assert_eq!(services.socks, [at("127.0.0.1:1080"), at("[::1]:1081")]);
        assert_eq!(services.http, [at("0.0.0.0:80")]);
    }

    #[test]
    fn each_port_needs_the_option_without_root() {
        for words in [
            ["--socks", "1080"],
            ["--http", "8080"],
            ["--forward", "80:b:80"],
            ["--expose", "22"],
        ] {
            let error = parsed(&words).expect_err("refused");
            assert!(error.contains("--userspace"), "{words:?}: {error}");
        }
    }

    #[test]
    fn a_wrong_value_says_what_is_expected() {
        for (words, expected) in [
            (["--userspace", "--socks=localhost"], "1080 or [::1]:1080"),
            (["--userspace", "--http=70000"], "1080 or [::1]:1080"),
            (["--userspace", "--forward=80:80"], "PORT:HOST:PORT"),
            (["--userspace", "--expose=0"], "1 to 65535"),
        ] {
            let error = parsed(&words).expect_err("refused");
            assert!(error.contains(expected), "{words:?}: {error}");
        }
    }

    #[test]
    fn without_a_port_nothing_could_use_the_tunnel() {
        let arguments = parsed(&["--userspace"]).expect("parsed");
        let error = arguments.services().expect_err("refused").to_string();
        for option in ["--socks", "--http", "--forward", "--expose"] {
            assert!(error.contains(option), "{error}");
        }
    }

    #[test]
    fn ports_that_other_hosts_reach_have_a_warning_each() {
        let words = [
            "--userspace",
            "--socks=[::ffff:127.0.0.1]:1080",
            "--socks=0.0.0.0:1080",
            "--http=[::]:80",
            "--forward=192.0.2.1:80:b:80",
            "--forward=80:b:80",
            "--expose=22",
        ];
        let arguments = parsed(&words).expect("parsed");
        let options: Vec<String> = arguments.warnings().map(|warning| warning.file).collect();
        assert_eq!(options, ["--socks", "--http", "--forward"]);
    }

    #[test]
    fn as_words_they_are_parsed_as_before() {
        let words = [
            "--userspace",
            "--socks=[::1]:1080",
            "--http=8080",
            "--forward=80:[fd00::1]:80/udp",
            "--expose=80:192.0.2.1:8080",
        ];
        let before = parsed(&words).expect("parsed");
        let words = before.words();
        let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
        let after = parsed(&words).expect("parsed again");
        assert_eq!(after.services().ok(), before.services().ok());
        assert!(parsed(&[]).expect("parsed").words().is_empty());
    }
}
