//! `seikan join`: makes this host a member of a mesh.
//!
//! Makes a key, registers its public key with the coordinator, writes the configuration of the
//! member, and starts the tunnel.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, anyhow, bail};
use clap::{Args, ValueHint};
use ipnet::IpNet;
use seikan_config::{CoordinatorUrl, encode_key, parse_private_key};
use seikan_mesh::client::{Client, ClientError, wait_for};
use seikan_mesh::join::{Member, register};
use seikan_mesh::web_proxy::WebProxies;
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::system::SystemRandom;
use seikan_proto::mesh::{Credential, JoinRequest, Joined, Name, Pin, Token};
use seikan_sys::netlink::{Family, Netlink, Route, RouteType};
use zeroize::Zeroizing;

use super::genkey::random_bytes;
use crate::recording::Draft;
use crate::service;
use crate::userspace::UserspaceArguments;

/// Directory of configurations.
const DIRECTORY: &str = "/etc/seikan";
/// File with the environment of the unit.
const ENVIRONMENT: &str = "/etc/seikan/environment";
/// Options of `join`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan join https://mesh.example.org:7443 --token skt_...\n  \
    sudo seikan join https://192.0.2.1:7443 --pin sha256:... --token skt_... --name db-1\n  \
    seikan join https://192.0.2.1:7443 --token skt_... --iface ./mesh.toml --userspace --socks 1080\n\n\
    `seikan coordinator token` prints the whole command. Writes /etc/seikan/IFACE.toml, with the host's private \
    key, and runs `seikan up -d IFACE`. `systemctl enable seikan@IFACE` starts the tunnel at every boot; \
    `seikan leave` reverts all but that. Without root, name a file with --iface.\n\n\
    HTTPS_PROXY=http://[USER:PASSWORD@]HOST:PORT names a web proxy to the coordinator and to relays over TLS, and \
    NO_PROXY the hosts without it. sudo removes such variables: export them and run `sudo \
    --preserve-env=HTTPS_PROXY,NO_PROXY seikan join ...`, which shows the password to nobody. seikan@.service reads \
    them from /etc/seikan/environment.")]
pub struct Arguments {
    /// URL of the coordinator: https://HOST or https://HOST:PORT
    #[arg(value_name = "URL")]
    url: CoordinatorUrl,
    /// Join token, as printed by `seikan coordinator token`; in the environment it is hidden from
    /// other users
    #[arg(
        long,
        env = "SEIKAN_TOKEN",
        hide_env_values = true,
        required_unless_present = "foreground"
    )]
    token: Option<String>,
    /// Pin of the coordinator's certificate, unless this system trusts it
    #[arg(long)]
    pin: Option<Pin>,
    /// Name of this host in the mesh [default: its host name]
    #[arg(long)]
    name: Option<Name>,
    /// Interface, or the configuration file to write
    #[arg(long, value_name = "IFACE|FILE", default_value = "seikan0", value_hint = ValueHint::AnyPath)]
    iface: String,
    /// UDP port to listen on [default: chosen by the kernel]
    #[arg(long)]
    port: Option<u16>,
    /// Accept this mesh network although it is not private or overlaps a route of this host
    /// (repeatable)
    #[arg(long = "network", value_name = "PREFIX")]
    networks: Vec<IpNet>,
    /// Write the configuration without starting the tunnel
    #[arg(long, conflicts_with = "foreground")]
    no_up: bool,
    /// Run the tunnel in this process, as a container needs it; a host that has already joined only
    /// starts the tunnel
    #[arg(long)]
    foreground: bool,
    #[command(flatten)]
    userspace: UserspaceArguments,
}

/// Joins the mesh.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let interface = seikan_config::interface_name(&arguments.iface)
        .with_context(|| format!("cannot use `{}` as interface", arguments.iface))?;
    let file = configuration_file(&arguments.iface, interface.as_str());
    // This is checked before the token is used up.
    let is_userspace = arguments.userspace.services()?.is_some();
    if file.exists() && arguments.foreground {
        return Err(start(&file, arguments));
    }
    let Some(token) = &arguments.token else {
        bail!(
            "cannot join without a token: there is no {}, so this host has not joined yet; add --token or SEIKAN_TOKEN",
            file.display()
        );
    };
    let token: Token = token
        .parse()
        .map_err(|error| anyhow!("cannot use this token: {error}"))?;
    if file.exists() {
        bail!(
            "cannot write {}: it exists; choose another --iface, or run `seikan leave {}` first",
            file.display(),
            arguments.iface
        );
    }
    let running =
        ask::running(&RuntimeDirs::for_client(Some(interface.as_str()))).unwrap_or_default();
    if running.iter().any(|name| name == interface.as_str()) {
        bail!(
            "cannot use {interface}: a tunnel runs there; choose another --iface, or stop it with `seikan down {interface}`"
        );
    }
    let name = match &arguments.name {
        Some(name) => name.clone(),
        None => default_name()?,
    };
    let web_proxies = WebProxies::from_env()?;
    let web_proxy = web_proxies.of_url(&arguments.url.to_string());
    // The directory may not be writable: this is tried before the token is used up. The file itself appears when it is
    // complete, since its presence says that this host has joined.
    drop(create(&file)?);
    let (joined, text, credential) = register_host(arguments, &token, &name, &web_proxies)?;
    if let Err(error) = write(&file, &text) {
        return Err(withdraw(arguments, credential, &name, &web_proxies, error));
    }
    let mut out = io::stdout();
    writeln!(out, "joined as {name}: wrote {}", file.display())?;
    for address in &joined.addresses {
        let (own, network) = (address.addr(), address.trunc());
        if is_userspace {
            writeln!(out, "this host is {own} in the mesh {network}")?;
        } else {
            writeln!(out, "this host is {own}, {network} is routed into the mesh")?;
        }
    }
    // In the foreground, as in a container, the environment stays the same at the next start.
    if let Some(proxy) = web_proxy.filter(|_| !arguments.foreground) {
        writeln!(
            out,
            "joined through web proxy {proxy}: write its variable to {ENVIRONMENT} (mode 600), where \
             seikan@{interface}.service reads it at boot"
        )?;
    }
    // The next program replaces this process and its buffer.
    out.flush()?;
    if arguments.no_up {
        return Ok(ExitCode::SUCCESS);
    }
    Err(start(&file, arguments))
}

/// Becomes `seikan up`, with its output and exit status. Returns only if that fails.
fn start(file: &Path, arguments: &Arguments) -> anyhow::Error {
    let mut up = Command::new("/proc/self/exe");
    up.arg("up").env_remove("SEIKAN_TOKEN");
    if !arguments.foreground {
        up.arg("-d");
    }
    up.args(arguments.userspace.words());
    let error = up.arg(file).exec();
    anyhow::Error::new(error).context("cannot run `seikan up`")
}

/// Registers this host with the coordinator; returns the answer, the configuration made of it, and the credential.
fn register_host(
    arguments: &Arguments,
    token: &Token,
    name: &Name,
    web_proxies: &WebProxies,
) -> anyhow::Result<(Joined, Zeroizing<String>, Credential)> {
    // Netlink is opened before the token is used up, because it may fail.
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
    let client = Client::new(&arguments.url, arguments.pin, None, web_proxies.clone())?;
    let answer = wait_for(register(&client, &request));
    let joined = answer.map_err(|error| match &error {
        ClientError::Unreachable { reason, .. }
            if arguments.pin.is_none() && reason.contains("certificate") =>
        {
            anyhow!("{error}; add --pin, as printed by `seikan coordinator token`, if the certificate is self-signed")
        }
        ClientError::Unreachable { is_of_web_proxy: false, .. } => {
            anyhow!("{error}; check the host in the URL (`seikan coordinator token --host HOST` prints another)")
        }
        _ => error.into(),
    })?;
    if let Err(error) = check_networks(&joined, &arguments.networks, &routes, |index| {
        netlink
            .link_by_index(index)
            .map_or_else(|_| format!("interface {index}"), |link| link.name)
    }) {
        return Err(withdraw(
            arguments,
            request.credential,
            name,
            web_proxies,
            error,
        ));
    }
    let member = Member {
        key: &key,
        coordinator: &arguments.url,
        pin: arguments.pin,
        credential: &request.credential,
        joined: &joined,
        port: arguments.port,
    };
    let text = member.to_toml();
    Ok((joined, text, request.credential))
}

/// Unregisters this host, which is a member although it cannot join: its name has to be free for another attempt. Adds
/// the outcome to the error.
fn withdraw(
    arguments: &Arguments,
    credential: Credential,
    name: &Name,
    web_proxies: &WebProxies,
    error: anyhow::Error,
) -> anyhow::Error {
    let credential = Some(credential);
    let client = Client::new(
        &arguments.url,
        arguments.pin,
        credential,
        web_proxies.clone(),
    );
    match client.and_then(|client| wait_for(client.leave())) {
        Ok(()) => error.context("cannot join; the token may be used up"),
        Err(_) => error.context(format!(
            "cannot join, but the coordinator lists {name} as a member; revoke it there"
        )),
    }
}

/// Returns the routes of this host that a mesh network must not overlap: all except default routes,
/// also in halves (as some tunnels set them), and routes of groups.
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
    // The widest route explains most. Routes of own addresses are part of connected networks.
    routes.sort_by_key(|route| {
        (
            route.kind == RouteType::Local,
            route.destination.prefix_len(),
        )
    });
    Ok(routes)
}

/// Checks that the mesh's networks are private and overlap no route, or were confirmed. `interface`
/// returns the name of an index.
fn check_networks(
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
        if !is_private(&network) {
            bail!(
                "cannot accept the mesh network {network}: it is not private, and traffic to it would be routed into \
                 the mesh; add --network {network} to accept it"
            );
        }
        let overlaps = |route: &&Route| {
            route.destination.contains(&network) || network.contains(&route.destination)
        };
        if let Some(route) = routes.iter().find(overlaps) {
            let device = route
                .device
                .map(|index| format!(" on {}", interface(index)));
            bail!(
                "cannot accept the mesh network {network}: it overlaps the route to {}{} of this host; add \
                 --network {network} to accept it",
                route.destination,
                device.unwrap_or_default()
            );
        }
    }
    Ok(())
}

/// Returns whether a network is in private (RFC 1918), shared (RFC 6598) or unique local (RFC 4193)
/// space. A coordinator must not attract other traffic.
fn is_private(network: &IpNet) -> bool {
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

/// Returns the file of an interface, where `up` looks for it, or the named file.
fn configuration_file(target: &str, interface: &str) -> PathBuf {
    if target == interface {
        Path::new(DIRECTORY).join(format!("{interface}.toml"))
    } else {
        PathBuf::from(target)
    }
}

/// Creates the file's directory, and a temporary file there.
fn create(file: &Path) -> anyhow::Result<Draft> {
    let failed = || {
        format!(
            "cannot write {}; name another file with --iface",
            file.display()
        )
    };
    if let Some(directory) = file
        .parent()
        .filter(|directory| !directory.as_os_str().is_empty())
    {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .with_context(failed)?;
    }
    Draft::create_new(file).with_context(failed)
}

/// Writes the file in one step: it is complete, or it does not exist.
fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    let draft = Draft::create_new(file)?;
    let written = draft.file().write_all(text.as_bytes());
    written.with_context(|| format!("cannot write {}", file.display()))?;
    draft.keep().map(drop)
}

/// Returns the host name up to the first dot.
fn default_name() -> anyhow::Result<Name> {
    let name = service::host_name();
    let label = name.split('.').next().unwrap_or_default();
    label.parse().map_err(|error| {
        anyhow!("cannot use the host name `{name}` as name in the mesh: {error}; add --name")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mesh_networks_are_private_unless_confirmed() {
        let is = |text: &str| is_private(&text.parse().expect(text));
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
    fn a_network_that_overlaps_a_route_needs_confirmation() {
        let refused = |network: &str, route: &str, confirmed: &[&str]| {
            let joined = Joined {
                addresses: vec![network.parse().expect(network)],
            };
            let confirmed: Vec<IpNet> = confirmed.iter().map(|n| n.parse().expect(n)).collect();
            let route = Route::to(route.parse().expect(route)).device(3);
            let outcome =
                check_networks(&joined, &confirmed, &[route], |index| format!("eth{index}"));
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
    fn an_interface_or_a_file_is_accepted_as_by_up() {
        assert_eq!(
            configuration_file("office", "office"),
            Path::new("/etc/seikan/office.toml")
        );
        assert_eq!(
            configuration_file("./x/office.toml", "office"),
            Path::new("./x/office.toml")
        );
    }
}
