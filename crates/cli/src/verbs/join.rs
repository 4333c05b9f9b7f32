//! `seikan join`: this host becomes a member of a mesh.
//!
//! Makes a key, which stays here; tells the coordinator its public half; writes what comes back as a configuration; and
//! brings it up as anybody would.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::{Args, ValueHint};
use ipnet::IpNet;
use seikan_config::{CoordinatorUrl, encode_key, parse_private_key};
use seikan_node::control::{Places, ask};
use seikan_node::mesh::client::{Client, ClientError, wait_for};
use seikan_node::node::SystemRandom;
use seikan_proto::mesh::{Credential, JoinRequest, Joined, Name, Pin, Token};
use seikan_sys::netlink::{Family, Netlink, Route, RouteType};
use zeroize::Zeroizing;

use super::genkey::random_bytes;

/// Where configurations are.
const FOLDER: &str = "/etc/seikan";
/// Times that a coordinator is asked which does not answer; it knows who asks again.
const ATTEMPTS: u32 = 3;
/// Between them.
const PAUSE: Duration = Duration::from_millis(500);

/// What `join` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan join https://mesh.example.org:7443 --token skt_...\n  \
    sudo seikan join https://192.0.2.1:7443 --pin sha256:... --token skt_... --name db-1\n\n\
    `seikan coordinator token` prints the whole line. Writes /etc/seikan/IFACE.toml, which holds the host's \
    private key and nothing that has to be kept elsewhere, and runs `seikan up -d IFACE`. To come up at every \
    start of the host: `systemctl enable seikan@IFACE`. `seikan leave` takes it all back.")]
pub struct Arguments {
    /// Where the coordinator is: https://HOST or https://HOST:PORT
    #[arg(value_name = "URL")]
    url: CoordinatorUrl,
    /// What admits this host; kept out of the list of processes in the environment
    #[arg(long, env = "SEIKAN_TOKEN", hide_env_values = true)]
    token: String,
    /// The coordinator's certificate; without it, one that this system trusts
    #[arg(long)]
    pin: Option<Pin>,
    /// What this host is called in the mesh [default: its host name]
    #[arg(long)]
    name: Option<Name>,
    /// Interface, or the file to write for it
    #[arg(long, value_name = "IFACE|FILE", default_value = "seikan0", value_hint = ValueHint::AnyPath)]
    iface: String,
    /// UDP port to listen on [default: any]
    #[arg(long)]
    port: Option<u16>,
    /// Accept this network of the mesh although it is not private, or overlaps routes of this host; may be given again
    #[arg(long = "network", value_name = "PREFIX")]
    networks: Vec<IpNet>,
    /// Write the configuration, and bring nothing up
    #[arg(long)]
    no_up: bool,
}

/// Joins.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let token: Token = arguments
        .token
        .parse()
        .map_err(|error| anyhow!("this is not a token: {error}"))?;
    let interface = seikan_config::interface_name(&arguments.iface)
        .with_context(|| format!("`{}` cannot be the interface", arguments.iface))?;
    let file = file(&arguments.iface, interface.as_str());
    if file.exists() {
        bail!(
            "{} is there already: choose another --iface, or take back what it is with `seikan leave {}`",
            file.display(),
            arguments.iface
        );
    }
    let is_running = ask::running(&Places::default()).unwrap_or_default();
    if is_running.iter().any(|name| name == interface.as_str()) {
        bail!(
            "a tunnel runs as {interface}: choose another --iface, or stop it with `seikan down {interface}`"
        );
    }
    let name = match &arguments.name {
        Some(name) => name.clone(),
        None => host_name()?,
    };
    // Whether the file can be written is known before a token is spent.
    let mut written = create(&file)?;
    let outcome = join(arguments, &token, &name).and_then(|(joined, text)| {
        let written = written
            .write_all(text.as_bytes())
            .and_then(|()| written.sync_all());
        written.with_context(|| format!("cannot write {}", file.display()))?;
        Ok(joined)
    });
    let joined = match outcome {
        Ok(joined) => joined,
        Err(error) => {
            let _ = fs::remove_file(&file);
            return Err(error);
        }
    };
    let mut out = io::stdout();
    writeln!(out, "joined as {name}: wrote {}", file.display())?;
    for address in &joined.addresses {
        let (own, network) = (address.addr(), address.trunc());
        writeln!(
            out,
            "this host is {own}; traffic to {network} goes into the mesh"
        )?;
    }
    // What follows takes this process's place, with what was not written yet.
    out.flush()?;
    if arguments.no_up {
        return Ok(ExitCode::SUCCESS);
    }
    // Becomes `seikan up -d`: what that says and how it ends is how this ends.
    let error = Command::new("/proc/self/exe")
        .arg("up")
        .arg("-d")
        .arg(&file)
        .env_remove("SEIKAN_TOKEN")
        .exec();
    Err(error).context("cannot run `seikan up`")
}

/// Asks the coordinator; its answer, and the configuration that comes of it.
fn join(
    arguments: &Arguments,
    token: &Token,
    name: &Name,
) -> anyhow::Result<(Joined, Zeroizing<String>)> {
    // Asked for before a token is spent.
    let netlink = Netlink::open()?;
    let routes = routes(&netlink)?;
    let key = encode_key(&*random_bytes()?);
    let key = parse_private_key(&key).context("cannot make a key")?;
    let request = JoinRequest {
        token: token.clone(),
        name: name.clone(),
        public_key: key.public(),
        credential: Credential::generate(&mut SystemRandom),
    };
    let client = Client::new(&arguments.url, arguments.pin, None)?;
    let mut attempt = 1;
    let answer = loop {
        match wait_for(client.join(&request)) {
            Err(ClientError::Unreachable { .. }) if attempt < ATTEMPTS => {
                attempt += 1;
                std::thread::sleep(PAUSE);
            }
            other => break other,
        }
    };
    let joined = answer.map_err(|error| match &error {
        ClientError::Unreachable { reason, .. }
            if arguments.pin.is_none() && reason.contains("certificate") =>
        {
            anyhow!("{error}; a coordinator with a certificate of its own takes --pin, as `seikan coordinator token` prints it")
        }
        _ => error.into(),
    })?;
    if let Err(error) = accept(&joined, &arguments.networks, &routes, |index| {
        netlink
            .link_by_index(index)
            .map_or_else(|_| format!("interface {index}"), |link| link.name)
    }) {
        // The coordinator has this host as a member by now; its name is to be free for another attempt.
        let client = Client::new(&arguments.url, arguments.pin, Some(request.credential))?;
        return Err(match wait_for(client.leave()) {
            Ok(()) => error.context("not joined; the token may be spent"),
            Err(_) => error.context(format!(
                "not joined, but the coordinator lists {name} as a member: revoke it there"
            )),
        });
    }
    let key = encode_key(key.as_bytes());
    let text = text(arguments, &joined, &request.credential, &key);
    Ok((joined, text))
}

/// The routes of this host that a network may overlap: all but default routes, also in halves (as some tunnels make
/// them), and those of groups.
fn routes(netlink: &Netlink) -> anyhow::Result<Vec<Route>> {
    let mut routes = netlink.all_routes(Family::V4)?;
    routes.extend(netlink.all_routes(Family::V6)?);
    routes.retain(|route| {
        let is_group = matches!(
            route.kind,
            RouteType::Broadcast | RouteType::Anycast | RouteType::Multicast
        );
        route.destination.prefix_len() > 1 && !is_group
    });
    // The widest says most; this host's own addresses are in a network that is connected.
    routes.sort_by_key(|route| {
        (
            route.kind == RouteType::Local,
            route.destination.prefix_len(),
        )
    });
    Ok(routes)
}

/// Whether the mesh's networks are private and nobody else's, or were confirmed. `interface` names one by its index.
fn accept(
    joined: &Joined,
    confirmed: &[IpNet],
    routes: &[Route],
    interface: impl Fn(u32) -> String,
) -> anyhow::Result<()> {
    for address in &joined.addresses {
        let network = address.trunc();
        if confirmed.iter().any(|net| net.contains(&network)) {
            continue;
        }
        if !is_for_meshes(&network) {
            bail!(
                "cannot accept the mesh's network {network}: it is not private, and traffic to it would go into the \
                 mesh; say --network {network} if that is meant"
            );
        }
        let overlaps = |route: &&Route| {
            route.destination.contains(&network) || network.contains(&route.destination)
        };
        if let Some(route) = routes.iter().find(overlaps) {
            let by = route
                .device
                .map(|index| format!(" on {}", interface(index)));
            bail!(
                "cannot accept the mesh's network {network}: it overlaps the route to {}{} of this host; say \
                 --network {network} if that is meant",
                route.destination,
                by.unwrap_or_default()
            );
        }
    }
    Ok(())
}

/// Whether a mesh may have it unasked: private (RFC 1918), shared (RFC 6598) or unique local (RFC 4193) space. A coordinator
/// cannot have traffic to others sent to its members.
fn is_for_meshes(network: &IpNet) -> bool {
    const SPACES: [&str; 5] = [
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "fc00::/7",
    ];
    let spaces = SPACES
        .iter()
        .filter_map(|space| space.parse::<IpNet>().ok());
    spaces.into_iter().any(|space| space.contains(network))
}

/// The configuration of a member.
fn text(
    arguments: &Arguments,
    joined: &Joined,
    credential: &Credential,
    key: &str,
) -> Zeroizing<String> {
    // Room for everything: growing would leave copies of the secrets behind.
    let mut text = Zeroizing::new(String::with_capacity(4096));
    text.push_str(
        "# Written by `seikan join`. It holds secrets of this host: keep it to yourself.\n",
    );
    let mut line = |key: &str, value: &str| {
        for part in [key, " = \"", value, "\"\n"] {
            text.push_str(part);
        }
    };
    line("private-key", key);
    line("coordinator", &arguments.url.to_string());
    if let Some(pin) = arguments.pin {
        line("coordinator-pin", &pin.to_string());
    }
    line("credential", &credential.reveal());
    let addresses: Vec<String> = joined
        .addresses
        .iter()
        .map(|address| format!("\"{address}\""))
        .collect();
    text.push_str(&format!("address = [{}]\n", addresses.join(", ")));
    if let Some(port) = arguments.port {
        text.push_str(&format!("listen-port = {port}\n"));
    }
    text
}

/// The file of an interface, as `up` looks for it.
fn file(target: &str, interface: &str) -> PathBuf {
    match target == interface {
        true => Path::new(FOLDER).join(format!("{interface}.toml")),
        false => PathBuf::from(target),
    }
}

fn create(file: &Path) -> anyhow::Result<fs::File> {
    let failed = || {
        format!(
            "cannot write {}: run as root, or name a file of your own with --iface",
            file.display()
        )
    };
    if let Some(folder) = file
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
    {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .with_context(failed)?;
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)
        .with_context(failed)
}

/// What the host is called, up to the first dot.
fn host_name() -> anyhow::Result<Name> {
    let name = fs::read_to_string("/proc/sys/kernel/hostname")
        .context("cannot ask for the host's name")?;
    let name = name.trim();
    let label = name.split('.').next().unwrap_or_default();
    label.parse().map_err(|error| {
        anyhow!("this host's name `{name}` cannot be its name in the mesh ({error}): say --name")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use seikan_config::{Overrides, Source, Syntax, parse};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn what_join_writes_is_what_up_reads() {
        let pin = Pin::of_certificate(b"a certificate").to_string();
        let line = [
            "join",
            "https://192.0.2.1:7443",
            "--token",
            "t",
            "--pin",
            &pin,
            "--port",
            "7",
        ];
        let arguments = Line::parse_from(line).arguments;
        let credential = format!("skc_{}", "A".repeat(32));
        let joined = Joined {
            addresses: vec!["100.80.0.1/12".parse().expect("an address")],
        };
        // RFC 7748, section 6.1: Alice's private key.
        let key = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";
        let shown = credential.parse().expect("a credential");
        let text = text(&arguments, &joined, &shown, key);
        let source = Source {
            file: "seikan0.toml".into(),
            syntax: Syntax::Toml,
            text,
        };
        let parsed = parse(&source, &Overrides::default(), &|_| {
            Err(io::ErrorKind::NotFound.into())
        });
        assert!(parsed.diagnostics.is_empty(), "{}", parsed.diagnostics);
        let config = parsed.config.expect("a configuration");
        assert_eq!(config.listen_port, Some(7));
        let mesh = config.mesh.expect("a mesh");
        assert_eq!(mesh.coordinator.to_string(), "https://192.0.2.1:7443");
        assert_eq!(mesh.pin.map(|pin| pin.to_string()), Some(pin));
        assert_eq!(*mesh.credential.reveal(), credential);
    }

    #[test]
    fn a_mesh_has_private_networks_unless_it_is_said_otherwise() {
        let is = |text: &str| is_for_meshes(&text.parse().expect(text));
        assert!(is("100.80.0.9/12") && is("10.1.2.3/8") && is("fd00::1/64"));
        for bad in [
            "0.0.0.0/0",
            "128.0.0.9/1",
            "93.184.216.9/24",
            "10.0.0.1/7",
            "2001:db8::1/64",
            "::/0",
        ] {
            assert!(!is(bad), "{bad}");
        }
    }

    #[test]
    fn a_network_that_overlaps_a_route_is_to_be_confirmed() {
        let refused = |network: &str, route: &str, confirmed: &[&str]| {
            let joined = Joined {
                addresses: vec![network.parse().expect(network)],
            };
            let confirmed: Vec<IpNet> = confirmed.iter().map(|n| n.parse().expect(n)).collect();
            let route = Route::to(route.parse().expect(route)).device(3);
            let outcome = accept(&joined, &confirmed, &[route], |index| format!("eth{index}"));
            outcome.err().map(|error| error.to_string())
        };
        for (network, route) in [
            ("10.0.0.9/8", "10.1.2.0/24"),
            ("10.1.0.9/16", "10.0.0.0/8"),
            ("10.1.0.9/16", "10.1.0.0/16"),
            ("fd00:1::9/64", "fd00::/8"),
        ] {
            let message = refused(network, route, &[]).expect(network);
            assert!(message.contains(&format!("{route} on eth3")), "{message}");
            let whole: IpNet = network.parse().expect(network);
            assert_eq!(refused(network, route, &[&whole.trunc().to_string()]), None);
        }
        for (network, route) in [
            ("10.0.0.9/8", "192.168.1.0/24"),
            ("10.0.0.9/8", "fd00::/8"),
            ("10.1.0.9/16", "10.2.0.0/16"),
        ] {
            assert_eq!(refused(network, route, &[]), None, "{network}, {route}");
        }
    }

    #[test]
    fn an_interface_or_a_file_is_meant_as_with_up() {
        assert_eq!(
            file("office", "office"),
            Path::new("/etc/seikan/office.toml")
        );
        assert_eq!(
            file("./x/office.toml", "office"),
            Path::new("./x/office.toml")
        );
    }
}
