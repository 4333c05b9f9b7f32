//! Configures the system's resolver with the `DNS =` servers of an interface, as wg-quick(8) does.
//!
//! There is no system call for this: the program that manages `/etc/resolv.conf` has to do it. That
//! is `resolvconf` (openresolv or Debian's), or `resolvectl` where systemd-resolved runs. The
//! servers of the interface become exclusive: they resolve all names.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::netlink::link::check_name;
use crate::resolv_conf;

/// Directory of systemd-resolved's state while it runs.
const RESOLVED_STATE: &str = "/run/systemd/resolve";
/// File with the services that the C library queries for names, nsswitch.conf(5).
const NSSWITCH: &str = "/etc/nsswitch.conf";
/// File in which Debian's resolvconf ranks interfaces by patterns.
const INTERFACE_ORDER: &str = "/etc/resolvconf/interface-order";

/// The settings of `DNS =`: servers and search domains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DnsSettings {
    /// Name servers, in order of preference.
    pub servers: Vec<IpAddr>,
    /// Search domains.
    pub search: Vec<String>,
}

/// Why the resolver could not be configured.
#[derive(Debug, thiserror::Error)]
pub enum DnsError {
    /// Neither program is installed.
    #[error(
        "cannot set the DNS servers of {interface}: there is neither `resolvconf` (install the \
         package openresolv or resolvconf) nor a running systemd-resolved with `resolvectl` \
         (install and start systemd-resolved); or remove `DNS =` from the configuration"
    )]
    NoResolver {
        /// The interface.
        interface: String,
    },
    /// systemd-resolved runs but cannot be configured.
    #[error(
        "systemd-resolved resolves names on this host, but there is no `resolvectl` to configure it for {interface}: install it"
    )]
    NoResolvectl {
        /// The interface.
        interface: String,
    },
    /// A name that could pass for an option or a second line of input.
    #[error("cannot set the DNS servers: `{name}` is not a valid {kind} name")]
    InvalidName {
        /// The name.
        name: String,
        /// `interface` or `domain`.
        kind: &'static str,
    },
    /// The program could not be started.
    #[error("cannot run `{command}`: {source}")]
    Start {
        /// The command line.
        command: String,
        /// The cause.
        source: io::Error,
    },
    /// The program failed.
    #[error("`{command}` failed ({status}): {output}")]
    Failed {
        /// The command line.
        command: String,
        /// Its exit status.
        status: std::process::ExitStatus,
        /// Its standard error.
        output: String,
    },
}

/// The program that configures the resolver.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Resolver {
    /// `resolvconf`, with the prefix that ranks a tunnel's interface first, if the system ranks
    /// interfaces.
    Resolvconf {
        program: PathBuf,
        prefix: String,
    },
    Resolvectl {
        program: PathBuf,
    },
}

/// One run of a program.
#[derive(Debug, PartialEq, Eq)]
struct Invocation {
    program: PathBuf,
    arguments: Vec<String>,
    input: String,
}

/// Settings in force. [`AppliedDns::undo`] reverts them, and so does dropping the value.
#[derive(Debug)]
pub struct AppliedDns {
    resolver: Resolver,
    interface: String,
    undone: bool,
}

/// Applies the settings of an interface.
pub fn apply(interface: &str, settings: &DnsSettings) -> Result<AppliedDns, DnsError> {
    check(interface, settings)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let order = std::fs::read_to_string(INTERFACE_ORDER).unwrap_or_default();
    let resolver =
        Resolver::find(&path, Path::new(RESOLVED_STATE).exists(), &order).ok_or_else(|| {
            DnsError::NoResolver {
                interface: interface.into(),
            }
        })?;
    // Created first, so that a failure half-way is reverted.
    let applied = AppliedDns {
        resolver,
        interface: interface.into(),
        undone: false,
    };
    for invocation in applied.resolver.apply(interface, settings) {
        invocation.run()?;
    }
    Ok(applied)
}

/// Whether programs on this host resolve names through systemd-resolved.
pub fn uses_resolved() -> bool {
    let [resolv_conf, nsswitch] = [resolv_conf::FILE, NSSWITCH].map(Path::new);
    Path::new(RESOLVED_STATE).exists() && resolv_conf::uses_resolved(resolv_conf, nsswitch)
}

/// Returns the name servers of this host: those that systemd-resolved queries where programs use it, otherwise those of
/// resolv.conf.
pub fn servers() -> Vec<IpAddr> {
    if uses_resolved() {
        // systemd-resolved.service(8): it writes the servers of all links there.
        resolv_conf::servers(&Path::new(RESOLVED_STATE).join("resolv.conf"))
    } else {
        resolv_conf::servers(Path::new(resolv_conf::FILE))
    }
}

/// Makes systemd-resolved query a server of an interface for names under a domain, and for no
/// others. The setting ends with the interface.
pub fn route(interface: &str, server: IpAddr, domain: &str) -> Result<AppliedDns, DnsError> {
    let settings = DnsSettings {
        servers: vec![server],
        search: vec![domain.to_owned()],
    };
    check(interface, &settings)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = find_program(&path, "resolvectl").ok_or_else(|| DnsError::NoResolvectl {
        interface: interface.into(),
    })?;
    let applied = AppliedDns {
        resolver: Resolver::Resolvectl {
            program: program.clone(),
        },
        interface: interface.into(),
        undone: false,
    };
    for invocation in routing(&program, interface, server, domain) {
        invocation.run()?;
    }
    Ok(applied)
}

/// Reverts [`route`].
pub fn unroute(interface: &str) -> Result<(), DnsError> {
    check(interface, &DnsSettings::default())?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    match find_program(&path, "resolvectl") {
        Some(program) => Resolver::Resolvectl { program }.undo(interface).run(),
        None => Ok(()),
    }
}

/// The domain is set before the server, because a server without a domain would be queried for all
/// names. DNSSEC and TLS are turned off: a local server for a domain that the DNS root does not
/// know has neither.
fn routing(program: &Path, interface: &str, server: IpAddr, domain: &str) -> [Invocation; 4] {
    let (server, domain) = (server.to_string(), format!("~{domain}"));
    [
        ["domain", interface, &domain],
        ["dnssec", interface, "no"],
        ["dnsovertls", interface, "no"],
        ["dns", interface, &server],
    ]
    .map(|arguments| invocation(program, arguments, String::new()))
}

/// Reverts the settings that another process, or this one before [`AppliedDns::keep`], applied for
/// an interface. Without a resolver there is nothing to revert.
pub fn revert(interface: &str) -> Result<(), DnsError> {
    check(interface, &DnsSettings::default())?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let order = std::fs::read_to_string(INTERFACE_ORDER).unwrap_or_default();
    match Resolver::find(&path, Path::new(RESOLVED_STATE).exists(), &order) {
        Some(resolver) => resolver.undo(interface).run(),
        None => Ok(()),
    }
}

impl AppliedDns {
    /// Returns the name of the configured program.
    pub fn by(&self) -> &'static str {
        match self.resolver {
            Resolver::Resolvconf { .. } => "resolvconf",
            Resolver::Resolvectl { .. } => "systemd-resolved",
        }
    }

    /// Leaves the settings in force; [`revert`] reverts them.
    pub fn keep(mut self) {
        self.undone = true;
    }

    /// Reverts the settings.
    pub fn undo(mut self) -> Result<(), DnsError> {
        self.undone = true;
        self.resolver.undo(&self.interface).run()
    }
}

impl Drop for AppliedDns {
    fn drop(&mut self) {
        if !self.undone {
            let _ = self.resolver.undo(&self.interface).run();
        }
    }
}

impl Resolver {
    fn find(path: &OsStr, resolved_runs: bool, interface_order: &str) -> Option<Self> {
        if let Some(program) = find_program(path, "resolvconf") {
            return Some(Self::Resolvconf {
                program,
                prefix: first_prefix(interface_order),
            });
        }
        let program = find_program(path, "resolvectl").filter(|_| resolved_runs)?;
        Some(Self::Resolvectl { program })
    }

    fn apply(&self, interface: &str, settings: &DnsSettings) -> Vec<Invocation> {
        let servers = settings.servers.iter().map(IpAddr::to_string);
        match self {
            Self::Resolvconf { program, prefix } => {
                let mut input: String = servers.map(|ip| format!("nameserver {ip}\n")).collect();
                if !settings.search.is_empty() {
                    input += &format!("search {}\n", settings.search.join(" "));
                }
                // Metric 0 ranks before all others; -x means exclusive (resolvconf(8) of
                // openresolv).
                let name = format!("{prefix}{interface}");
                vec![invocation(program, ["-a", &name, "-m", "0", "-x"], input)]
            }
            Self::Resolvectl { program } => {
                let mut dns = vec!["dns".to_owned(), interface.into()];
                dns.extend(servers);
                // "~." routes all names to this interface (resolvectl(1)).
                let mut domain = vec!["domain".to_owned(), interface.into(), "~.".into()];
                domain.extend(settings.search.iter().cloned());
                vec![
                    Invocation {
                        program: program.clone(),
                        arguments: dns,
                        input: String::new(),
                    },
                    Invocation {
                        program: program.clone(),
                        arguments: domain,
                        input: String::new(),
                    },
                ]
            }
        }
    }

    fn undo(&self, interface: &str) -> Invocation {
        match self {
            Self::Resolvconf { program, prefix } => {
                // -f: no error if there is nothing to remove.
                let name = format!("{prefix}{interface}");
                invocation(program, ["-d", &name, "-f"], String::new())
            }
            Self::Resolvectl { program } => {
                invocation(program, ["revert", interface], String::new())
            }
        }
    }
}

impl Invocation {
    fn run(&self) -> Result<(), DnsError> {
        let command = || format!("{} {}", self.program.display(), self.arguments.join(" "));
        let start = |source| DnsError::Start {
            command: command(),
            source,
        };
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(start)?;
        if let Some(mut stdin) = child.stdin.take() {
            // If a program does not read all of its input, its status tells whether that is an
            // error.
            let _ = stdin.write_all(self.input.as_bytes());
        }
        let output = child.wait_with_output().map_err(start)?;
        if output.status.success() {
            return Ok(());
        }
        Err(DnsError::Failed {
            command: command(),
            status: output.status,
            output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }
}

fn invocation<const N: usize>(program: &Path, arguments: [&str; N], input: String) -> Invocation {
    let arguments = arguments.map(str::to_owned).to_vec();
    Invocation {
        program: program.into(),
        arguments,
        input,
    }
}

fn find_program(path: &OsStr, name: &str) -> Option<PathBuf> {
    std::env::split_paths(path)
        .map(|directory| directory.join(name))
        .find(|program| program.is_absolute() && is_executable(program))
}

fn is_executable(path: &Path) -> bool {
    nix::unistd::access(path, nix::unistd::AccessFlags::X_OK).is_ok() && path.is_file()
}

/// Returns the prefix under which an interface ranks highest: the first pattern of the form
/// `NAME*`.
fn first_prefix(interface_order: &str) -> String {
    interface_order
        .lines()
        .find_map(|line| {
            let name = line.strip_suffix('*')?;
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
            (!name.is_empty() && name.chars().all(plain)).then(|| format!("{name}."))
        })
        .unwrap_or_default()
}

/// Checks names that become arguments and lines of input: none may pass for an option or a second
/// line.
fn check(interface: &str, settings: &DnsSettings) -> Result<(), DnsError> {
    if check_name(interface).is_err() || interface.starts_with('-') {
        return Err(DnsError::InvalidName {
            name: interface.into(),
            kind: "interface",
        });
    }
    let letter = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    for name in &settings.search {
        if name.is_empty() || name.starts_with('-') || !name.chars().all(letter) {
            return Err(DnsError::InvalidName {
                name: name.clone(),
                kind: "domain",
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn settings() -> DnsSettings {
        DnsSettings {
            servers: vec!["10.0.0.53".parse().unwrap(), "fd00::53".parse().unwrap()],
            search: vec!["corp.example".into(), "example".into()],
        }
    }

    fn program(directory: &Path, name: &str, script: &str) -> PathBuf {
        let path = directory.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn resolvconf_gets_the_same_input_as_from_wg_quick() {
        let resolver = Resolver::Resolvconf {
            program: "/sbin/resolvconf".into(),
            prefix: String::new(),
        };
        let expected = Invocation {
            program: "/sbin/resolvconf".into(),
            arguments: ["-a", "wg0", "-m", "0", "-x"].map(Into::into).to_vec(),
            input: "nameserver 10.0.0.53\nnameserver fd00::53\nsearch corp.example example\n"
                .into(),
        };
        assert_eq!(resolver.apply("wg0", &settings()), [expected]);
        assert_eq!(resolver.undo("wg0").arguments, ["-d", "wg0", "-f"]);
    }

    #[test]
    fn the_interface_order_of_debian_gives_the_prefix() {
        let order = "# comment\nlo.inet6\nlo.inet\nlo.@(dnsmasq|bind9)\ntun*\ntap*\neth*\n";
        assert_eq!(first_prefix(order), "tun.");
        assert_eq!(first_prefix("lo.inet\n@(a|b)*\n"), "");
    }

    #[test]
    fn resolvectl_gets_servers_and_the_domain_of_all() {
        let resolver = Resolver::Resolvectl {
            program: "/usr/bin/resolvectl".into(),
        };
        let arguments: Vec<_> = resolver
            .apply("wg0", &settings())
            .into_iter()
            .map(|invocation| invocation.arguments.join(" "))
            .collect();
        assert_eq!(
            arguments,
            [
                "dns wg0 10.0.0.53 fd00::53",
                "domain wg0 ~. corp.example example"
            ]
        );
        assert_eq!(resolver.undo("wg0").arguments, ["revert", "wg0"]);
    }

    #[test]
    fn resolvectl_gets_one_domain_for_one_server() {
        let server = "100.80.0.2".parse().unwrap();
        let commands = routing(
            Path::new("/usr/bin/resolvectl"),
            "seikan0",
            server,
            "seikan",
        );
        let commands = commands.map(|invocation| invocation.arguments.join(" "));
        assert_eq!(commands[0], "domain seikan0 ~seikan");
        assert_eq!(commands[3], "dns seikan0 100.80.0.2");
    }

    #[test]
    fn resolvconf_is_preferred_and_resolvectl_needs_the_service() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().as_os_str();
        assert_eq!(Resolver::find(path, true, ""), None);
        let resolvectl = program(directory.path(), "resolvectl", "exit 0");
        assert_eq!(Resolver::find(path, false, ""), None);
        let found = Resolver::find(path, true, "");
        assert_eq!(
            found,
            Some(Resolver::Resolvectl {
                program: resolvectl
            })
        );
        let resolvconf = program(directory.path(), "resolvconf", "exit 0");
        let found = Resolver::find(path, true, "");
        assert_eq!(
            found,
            Some(Resolver::Resolvconf {
                program: resolvconf,
                prefix: String::new()
            })
        );
    }

    #[test]
    fn the_program_reads_its_input() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let script = format!("{{ echo \"$@\"; cat; }} >> {}", record.display());
        let resolver = Resolver::Resolvconf {
            program: program(directory.path(), "resolvconf", &script),
            prefix: "tun.".into(),
        };
        resolver.apply("wg0", &settings())[0].run().unwrap();
        resolver.undo("wg0").run().unwrap();
        assert_eq!(
            fs::read_to_string(record).unwrap(),
            "-a tun.wg0 -m 0 -x\nnameserver 10.0.0.53\nnameserver fd00::53\n\
             search corp.example example\n-d tun.wg0 -f\n"
        );
    }

    #[test]
    fn a_failure_carries_the_programs_words() {
        let directory = tempfile::tempdir().unwrap();
        let program = program(
            directory.path(),
            "resolvconf",
            "echo no such thing >&2; exit 3",
        );
        let error = invocation(&program, ["-a"], String::new())
            .run()
            .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("resolvconf -a") && text.contains("no such thing"),
            "{text}"
        );
    }

    #[test]
    fn settings_are_taken_back_when_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let script = format!("echo \"$@\" >> {}", record.display());
        let resolver = Resolver::Resolvectl {
            program: program(directory.path(), "resolvectl", &script),
        };
        drop(AppliedDns {
            resolver: resolver.clone(),
            interface: "wg0".into(),
            undone: false,
        });
        AppliedDns {
            resolver,
            interface: "wg1".into(),
            undone: false,
        }
        .undo()
        .unwrap();
        assert_eq!(
            fs::read_to_string(record).unwrap(),
            "revert wg0\nrevert wg1\n"
        );
    }

    #[test]
    fn names_that_could_pass_for_something_else_are_refused() {
        for (interface, domain) in [("-x", "a"), ("wg0", "-a"), ("wg0", "a\nnameserver 6.6.6.6")] {
            let settings = DnsSettings {
                servers: vec![],
                search: vec![domain.into()],
            };
            assert!(
                matches!(
                    apply(interface, &settings),
                    Err(DnsError::InvalidName { .. })
                ),
                "{interface:?} {domain:?}"
            );
        }
    }

    #[test]
    fn without_a_resolver_the_error_says_which_program_to_install() {
        let text = DnsError::NoResolver {
            interface: "wg0".into(),
        }
        .to_string();
        assert!(
            text.contains("openresolv") && text.contains("systemd-resolved"),
            "{text}"
        );
    }
}
