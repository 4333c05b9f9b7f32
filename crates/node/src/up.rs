//! Brings a tunnel up from a configuration, and down again.
//!
//! Order of `up`: the control sockets, which reserve the name; the journal, and the clean-up after a killed
//! instance; checks for conflicts ([`check_conflicts`]); a member's web proxy; the monitor ([`crate::monitor`]);
//! `PreUp`; the plan of routes; the interface with its sockets; addresses, MTU, link up; name servers; routes,
//! rules, firewall; `PostUp`; the names of a mesh. Then the monitor is sealed, the process switches to a user of its own with
//! `CAP_NET_ADMIN` and is confined, and the worker runs. The way down is the reverse, by the monitor:
//! `PreDown`, `SaveConfig`; the interface; everything in the journal, `PostDown`. After a failure or a signal
//! during `up`, the steps done so far are undone.
//!
//! A tunnel without root ([`crate::userspace`]) changes nothing of the host: its configuration has no hooks, name servers,
//! routes or rules left, and a stack in this process takes the place of the interface. It starts last, confined like the
//! rest. The monitor has no privileges then, but can execute programs and remove files, which the daemon cannot.
//!
//! [`up_unconfigured`] does the same for an interface that `wg` and `ip` configure: it starts down, with neither
//! addresses, routes, peers nor a private key.

use crate::control::{Control, ControlError, RuntimeDirs};
use crate::endpoints::{Resolved, name_servers, resolve_all};
use crate::former::FormerSessions;
use crate::gateway::{GatewayNode, LanError};
use crate::journal::{Journal, JournalError};
use crate::mesh::Mesh;
use crate::monitor::{self, Leaving, Monitor, MonitorError, Sealed};
use crate::network::{LanMonitor, NetworkMonitor, NetworkMonitorError, Settings};
use crate::node::{Node, NodeError, WIREGUARD_MTU, default_mtu, tun_options};
use crate::options::UpOptions;
use crate::save::Running;
use crate::setup::hooks::Moment;
use crate::setup::names::Names;
use crate::setup::routes::{Plan, PlanError};
use crate::setup::{self, Recorder, firewall, forwarding, mtu, occupied, routes};
use crate::system::SystemRandom;
use crate::userspace::{Stack, StackError, UserspaceError, adapt};
use crate::worker::{self, ControlFlow, Ended, Service};
use seikan_config::{
    CipherPreference, Config, Diagnostic, GatewayMode, GatewaySettings, Hooks, InterfaceName,
    InterfaceNameError, Mode, PrivateKey, Protocol, Repair, Severity, Table,
};
use seikan_mesh::agent::AgentError;
use seikan_mesh::client;
use seikan_mesh::names::Found;
use seikan_mesh::web_proxy::{ProxyError, WebProxies};
use seikan_sys::confine::{Needs, confine};
use seikan_sys::dns::DnsError;
use seikan_sys::handover::Folder;
use seikan_sys::netlink::{Family, Netlink, NetlinkError, TABLE_MAIN};
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::privilege::{self, Capability, Identity, PrivilegeError};
use seikan_sys::signal::{Signal, Signals};
use seikan_sys::tun::{Tun, TunError};
use seikan_sys::udp::UdpError;
use seikan_userspace::Listener;
use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tracing::warn;

/// Token of the stream to the monitor; distinct from all others.
const TOKEN_MONITOR: u64 = (1 << 62) + 32;
/// Maximum time to wait for the end of an instance whose interface was deleted.
const PREDECESSOR_PATIENCE: Duration = Duration::from_secs(2);
/// Maximum time until the names of endpoints are resolved that could not be resolved later; about that of wg-quick, and
/// less than systemd allows a unit for its start (`DefaultTimeoutStartSec`, 90 s).
const NAMES_PATIENCE: Duration = Duration::from_secs(60);
/// First pause between two attempts to resolve names; each next one is a fifth longer, as in wg-quick.
const NAMES_PAUSE: Duration = Duration::from_secs(1);

/// Why `up` failed. Everything that was done was undone.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    /// The node.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Interface set-up.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Routes and rules.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Signals.
    #[error("cannot block signals: {0}")]
    Signals(io::Error),
    /// Another instance runs, or the control sockets cannot be created.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The changes of an earlier instance cannot be undone.
    #[error(transparent)]
    State(#[from] JournalError),
    /// The monitor or a hook failed.
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    /// Name servers.
    #[error(transparent)]
    Dns(#[from] DnsError),
    /// Privileges.
    #[error(transparent)]
    Privilege(#[from] PrivilegeError),
    /// The given device has a name that Seikan does not use.
    #[error(transparent)]
    Name(#[from] InterfaceNameError),
    /// The network cannot be monitored.
    #[error(transparent)]
    NetworkMonitor(#[from] NetworkMonitorError),
    /// This host cannot take part in its mesh.
    #[error(transparent)]
    Mesh(#[from] AgentError),
    /// The environment names a web proxy that cannot be used.
    #[error(transparent)]
    WebProxy(#[from] ProxyError),
    /// The gateway's interface on the local network.
    #[error(transparent)]
    Lan(#[from] LanError),
    /// The directory of the mesh's state cannot be opened.
    #[error(
        "cannot open {}, which keeps the state of the mesh: {source}",
        path.display()
    )]
    Kept {
        /// Its path.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The configuration does not fit a tunnel without root.
    #[error(transparent)]
    Userspace(#[from] UserspaceError),
    /// The stack of a tunnel without root.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// The stack ended while the tunnel ran.
    #[error(
        "the TCP/IP stack of {interface} has ended, and the tunnel with it: start it again, and report this bug"
    )]
    StackGone {
        /// The name of the tunnel.
        interface: String,
    },
    /// The process lacks a capability.
    #[error(
        "bringing up interface {interface} needs CAP_NET_ADMIN, which this process lacks: run it with sudo, or run \
         `setcap cap_net_admin+ep` on the program once{alternative}"
    )]
    NotPermitted {
        /// The interface.
        interface: String,
        /// Another remedy.
        alternative: &'static str,
    },
    /// The name is in use.
    #[error("interface {interface} exists already: {usage}")]
    InterfaceExists {
        /// The interface.
        interface: String,
        /// Its present use, and the remedy.
        usage: String,
    },
    /// The name of an endpoint could not be resolved in time, and never could be once the tunnel is set up.
    #[error("{error}; all names would be looked up through the tunnel, which needs this one first")]
    NameInside {
        /// The error of the last attempt.
        error: NodeError,
    },
    /// The port is in use.
    #[error(
        "UDP port {port} is in use by {holder}: choose another `ListenPort`, or stop that first"
    )]
    PortInUse {
        /// The port.
        port: u16,
        /// The process that uses it.
        holder: String,
    },
    /// The interface was deleted while the tunnel ran.
    #[error(
        "interface {interface} was deleted, so the tunnel ended; start it again, and find out who deleted it"
    )]
    InterfaceGone {
        /// The interface.
        interface: String,
    },
}

/// Properties of a tunnel that is up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpSummary {
    /// The interface.
    pub interface: String,
    /// The wire protocol.
    pub protocol: seikan_config::Protocol,
    /// The UDP port of both families.
    pub port: u16,
    /// The MTU inside the tunnel.
    pub mtu: u32,
    /// Addresses of the host that lead into a tunnel without root.
    pub listeners: Vec<Listener>,
}

/// Receiver of events of `up`.
pub trait Observer {
    /// A warning; the tunnel continues.
    fn warn(&mut self, warning: Diagnostic);
    /// The tunnel is up. An error stops it again, since nobody learned of it.
    fn is_up(&mut self, summary: &UpSummary) -> io::Result<()>;
}

/// Objects that another program has opened for an unconfigured interface.
#[derive(Debug, Default)]
pub struct Given {
    /// An open TUN device, attached to its interface.
    pub device: Option<OwnedFd>,
    /// A listening socket for `wg`.
    pub uapi: Option<UnixListener>,
}

/// Brings the tunnel up and runs it until it is stopped.
///
/// The process must have a single thread, and has few privileges afterwards.
pub fn up(
    config: &Config,
    options: &UpOptions,
    observer: &mut dyn Observer,
) -> Result<(), UpError> {
    if options.userspace.is_some() {
        let config = adapt(config, &mut |warning| observer.warn(warning))?;
        return start(&config, options, None, observer);
    }
    start(config, options, None, observer)
}

/// Runs a WireGuard interface that `wg` and `ip` configure, until it is stopped or deleted. The interface has the
/// name of the given device, if there is one.
///
/// The process must have a single thread, and has few privileges afterwards.
pub fn up_unconfigured(
    name: InterfaceName,
    given: Given,
    options: &UpOptions,
    observer: &mut dyn Observer,
) -> Result<(), UpError> {
    let mut config = unconfigured(name);
    let device = match given.device {
        Some(device) => {
            let tun = Tun::adopt(device, &tun_options(&config)).map_err(NodeError::Tun)?;
            config.name = tun.name().parse()?;
            Some(tun)
        }
        None => None,
    };
    let unconfigured = Unconfigured {
        device,
        uapi: given.uapi,
    };
    match start(&config, options, Some(unconfigured), observer) {
        // The usual end, as by `wg-quick down`.
        Err(UpError::InterfaceGone { .. }) => Ok(()),
        other => other,
    }
}

/// An interface that other programs configure.
struct Unconfigured {
    device: Option<Tun>,
    uapi: Option<UnixListener>,
}

/// Returns the configuration of an interface that other programs configure. Nobody knows its key.
fn unconfigured(name: InterfaceName) -> Config {
    Config {
        name,
        protocol: Protocol::Wireguard,
        mode: Mode::Ip,
        private_key: PrivateKey::generate(&mut SystemRandom),
        listen_port: None,
        addresses: Vec::new(),
        mtu: Some(WIREGUARD_MTU),
        dns: Vec::new(),
        dns_search: Vec::new(),
        table: Table::Off,
        fwmark: None,
        hooks: Hooks::default(),
        save_config: false,
        offload: true,
        metrics: None,
        cipher: CipherPreference::Auto,
        copy_dscp: false,
        repair: Repair::default(),
        uplink_rate: None,
        peers: Vec::new(),
        gateway: None,
        mesh: None,
    }
}

/// Brings a tunnel up, configured or not, and runs it.
fn start(
    config: &Config,
    options: &UpOptions,
    unconfigured: Option<Unconfigured>,
    observer: &mut dyn Observer,
) -> Result<(), UpError> {
    privilege::forbid_core_dumps()?;
    let signals = Signals::block().map_err(UpError::Signals)?;
    let netlink = Netlink::open()?;
    if options.userspace.is_none() && !privilege::has_net_admin() {
        return Err(UpError::NotPermitted {
            interface: config.name.to_string(),
            alternative: if unconfigured.is_some()
                || config.gateway.is_some()
                || config.mode == Mode::Ethernet
            {
                ""
            } else {
                "; or add `--userspace --socks 1080`, which needs no interface"
            },
        });
    }
    let is_configured = unconfigured.is_none();
    let (device, uapi) = match unconfigured {
        Some(given) => {
            wait_for_predecessor(config, &options.dirs, &netlink);
            (given.device, given.uapi)
        }
        None => (None, None),
    };
    // Declared first and so dropped last: the name stays reserved until then.
    let mut control = Control::with_uapi(&options.dirs, config, uapi)?;
    let file = options.config_file.as_deref();
    let absolute = file.and_then(|file| std::path::absolute(file).ok());
    control.set_files(absolute, options.log.clone());
    if !is_configured {
        control.set_keyless();
    }
    let journal = open_journal(config, options, observer)?;
    if device.is_none() && options.userspace.is_none() {
        check_conflicts(config, &netlink)?;
    }
    // Before anything is set up: a service manager repeats the start, and a mistyped variable stays.
    let web_proxies = match config.mesh {
        Some(_) => WebProxies::from_env()?,
        None => WebProxies::default(),
    };
    let monitor = Monitor::start(config, options, journal)?;
    let mut work = Work {
        config,
        options,
        observer,
        signals: &signals,
        netlink,
        is_configured,
        device,
        stack_end: None,
        node: None,
        chosen_mark: None,
        was_up: false,
        settings: Settings::default(),
        names: None,
        web_proxies,
        monitor,
    };
    let outcome = work.bring_up().and_then(|()| work.run(&mut control));
    work.tear_down();
    drop(work);
    match outcome? {
        Ended::Requested => Ok(()),
        Ended::InterfaceGone => {
            let interface = config.name.to_string();
            Err(if options.userspace.is_some() {
                UpError::StackGone { interface }
            } else {
                UpError::InterfaceGone { interface }
            })
        }
    }
}

/// Waits until an instance has ended whose interface is gone already, as after `wg-quick down`.
fn wait_for_predecessor(config: &Config, dirs: &RuntimeDirs, netlink: &Netlink) {
    let name = config.name.as_str();
    let until = Instant::now() + PREDECESSOR_PATIENCE;
    while dirs.is_running(name).unwrap_or(false)
        && matches!(netlink.link_index(name), Ok(None))
        && Instant::now() < until
    {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Opens the journal, and undoes the changes of a killed instance.
fn open_journal(
    config: &Config,
    options: &UpOptions,
    observer: &mut dyn Observer,
) -> Result<Journal, UpError> {
    let (mut journal, left) = match Journal::open(&options.dirs.run, config.name.as_str()) {
        Ok(opened) => opened,
        Err(error @ JournalError::Locked { .. }) => return Err(error.into()),
        Err(error) => {
            observer.warn(setup::without_journal(&error.to_string()));
            (Journal::in_memory(), Vec::new())
        }
    };
    let remaining = monitor::take_back(config.name.as_str(), left, &mut |w| observer.warn(w));
    if let Err(error) = journal.settle(remaining) {
        observer.warn(setup::without_journal(&error.to_string()));
    }
    Ok(journal)
}

/// Checks for conflicts that can be detected before any hook has run.
fn check_conflicts(config: &Config, netlink: &Netlink) -> Result<(), UpError> {
    let interface = config.name.to_string();
    let Some(index) = netlink.link_index(&interface)? else {
        return Ok(());
    };
    let kind = netlink.link_by_index(index).map(|link| link.kind);
    let usage = match (
        occupied::tun_holder(&interface),
        kind.unwrap_or_default().as_str(),
    ) {
        (Some(holder), _) => {
            format!("{holder} uses it; stop that first, or rename the configuration file")
        }
        (None, "tun") => format!(
            "a TUN device that no process uses; if it is a left-over, remove it with `ip link delete {interface}`"
        ),
        (None, "wireguard") => format!(
            "the kernel's WireGuard uses it; stop that first with `wg-quick down {interface}` or `ip link delete \
             {interface}`"
        ),
        (None, kind) => format!(
            "it is {}; rename the configuration file",
            if kind.is_empty() {
                "a network interface".to_owned()
            } else {
                format!("a {kind} device")
            }
        ),
    };
    Err(UpError::InterfaceExists { interface, usage })
}

/// A tunnel during `up` and `down`. The node precedes the monitor: if this process panics, the interface is
/// removed before the monitor cleans up, and the process waits for that.
struct Work<'a> {
    config: &'a Config,
    options: &'a UpOptions,
    observer: &'a mut dyn Observer,
    signals: &'a Signals,
    netlink: Netlink,
    /// Other programs do not configure the interface.
    is_configured: bool,
    /// A device that another program has opened.
    device: Option<Tun>,
    /// The end of the device for a stack in this process.
    stack_end: Option<OwnedFd>,
    node: Option<Node>,
    /// The mark that the plan of routes chose, which is not in the configuration.
    chosen_mark: Option<u32>,
    /// The tunnel was up, so that its state is worth saving.
    was_up: bool,
    /// Addresses, routes and rules that were added to the kernel's tables.
    settings: Settings,
    /// Names of members, if this host is a member.
    names: Option<Names>,
    /// The web proxy of a member.
    web_proxies: WebProxies,
    monitor: Monitor,
}

impl Work<'_> {
    /// Performs all steps of `up`; returns early, without a node, after a signal.
    fn bring_up(&mut self) -> Result<(), UpError> {
        self.monitor.run(Moment::PreUp)?;
        if self.is_interrupted() {
            return Ok(());
        }
        let Some(resolved) = self.resolve_endpoints()? else {
            return Ok(());
        };
        let endpoints = resolved.endpoints();
        let mut config = resolved.config;
        let plan = routes::plan(&config, &endpoints, &self.netlink)?;
        if config.fwmark.is_none_or(|mark| mark == 0) {
            self.chosen_mark = plan.mark;
        }
        config.fwmark = plan.mark;
        config.mtu = Some(mtu::inner_mtu(
            &config,
            &endpoints.addresses,
            plan.mark,
            &self.netlink,
        ));
        if self.options.userspace.is_some() {
            let (device, end) = Tun::pair(config.name.as_str()).map_err(NodeError::Tun)?;
            (self.device, self.stack_end) = (Some(device), Some(end));
        }
        let node = match self.device.take() {
            Some(device) => Node::with_device(&config, device),
            None => Node::create(&config),
        };
        let mut node = node.map_err(|error| self.explain(error))?;
        node.former = FormerSessions::take(&self.options.dirs.former(self.config.name.as_str()));
        let index = node.tun.index();
        self.node = Some(node);
        match index {
            Some(index) => self.set_up_host(&config, &plan, index),
            None => {
                self.names = config.mesh.as_ref().map(|_| Names::of_proxies());
                Ok(())
            }
        }
    }

    /// Resolves the endpoints, with a warning for each name that fails; returns `None` after a signal. Retries names that
    /// could not be resolved any more once the tunnel is set up.
    fn resolve_endpoints(&mut self) -> Result<Option<Resolved>, UpError> {
        let until = Instant::now() + NAMES_PATIENCE;
        let mut pause = NAMES_PAUSE;
        let mut has_warned = false;
        loop {
            let mut resolved = resolve_all(self.config);
            let mut main = Vec::new();
            if !resolved.failures.is_empty() {
                for family in [Family::V4, Family::V6] {
                    main.extend(self.netlink.routes(family, TABLE_MAIN)?);
                }
            }
            if !resolved.is_deadlock(&name_servers(), &main) {
                resolved.warn(&mut |warning| self.observer.warn(warning));
                return Ok(Some(resolved));
            }
            let (_, error) = resolved.failures.swap_remove(0);
            let now = Instant::now();
            if now >= until {
                return Err(UpError::NameInside { error });
            }
            if !std::mem::replace(&mut has_warned, true) {
                let name = self.config.name.as_str();
                let warning = Diagnostic::new(Severity::Warning, name, error.to_string());
                let help = "the tunnel would lead all look-ups of names to this peer: it starts once the name is \
                            resolved, or fails after a minute";
                self.observer.warn(warning.with_help(help));
            }
            if self.is_interrupted_within(pause.min(until - now)) {
                return Ok(None);
            }
            pause = pause * 6 / 5;
        }
    }

    /// Sets up the interface and everything else of the host, and runs the hooks after it.
    fn set_up_host(&mut self, config: &Config, plan: &Plan, index: u32) -> Result<(), UpError> {
        if self.is_configured {
            setup::set_up_interface(config, index, &self.netlink)?;
        } else {
            setup::prepare_interface(config, index, &self.netlink)?;
        }
        let observer = &mut *self.observer;
        let mut recorder = Recorder {
            journal: &mut self.monitor,
            warn: &mut |warning| observer.warn(warning),
        };
        setup::set_dns(config, &mut recorder)?;
        let others = &self.options.dirs.run;
        setup::set_routes(config, plan, index, &self.netlink, others, &mut recorder)?;
        self.settings = Settings::new(&config.addresses, plan);
        if let Some(mark) = plan.own_table() {
            firewall::apply(config, mark, &mut recorder);
        }
        self.open_gateway(config, index)?;
        if self.is_interrupted() {
            return Ok(());
        }
        self.monitor.run(Moment::PostUp)?;
        if config.mesh.is_some() {
            // After the hooks: no query is answered before the agent runs.
            let observer = &mut *self.observer;
            let mut recorder = Recorder {
                journal: &mut self.monitor,
                warn: &mut |warning| observer.warn(warning),
            };
            self.names = Some(Names::set(config, &mut recorder));
        }
        Ok(())
    }

    /// Sets up the gateway, if configured: its interface, or the kernel's forwarding.
    fn open_gateway(&mut self, config: &Config, index: u32) -> Result<(), UpError> {
        let (Some(settings), Some(node)) = (&config.gateway, &mut self.node) else {
            return Ok(());
        };
        let mtu = config.mtu.unwrap_or(default_mtu(config.protocol));
        let (identity, pacer) = (node.tunnel.identity(), &node.pacer);
        let gateway = GatewayNode::open(config, settings, identity, pacer, mtu, &self.netlink)?;
        node.gateway = Some(gateway);
        if settings.mode == GatewayMode::Routed {
            let observer = &mut *self.observer;
            let mut recorder = Recorder {
                journal: &mut self.monitor,
                warn: &mut |warning| observer.warn(warning),
            };
            forwarding::apply(config, settings, index, &self.netlink, &mut recorder)?;
        }
        Ok(())
    }

    /// Runs the worker, unless a signal has arrived before.
    fn run(&mut self, control: &mut Control) -> Result<Ended, UpError> {
        let interrupted = self.is_interrupted();
        let Some(node) = self.node.as_mut().filter(|_| !interrupted) else {
            return Ok(Ended::Requested);
        };
        let mut identity = Identity::of_daemon()?;
        let kept = match self.config.mesh {
            Some(_) => Some(open_kept(
                &self.options.dirs,
                self.config,
                &mut identity,
                &mut *self.observer,
            )?),
            None => None,
        };
        let found = self.names.as_ref().map(|names| &names.found);
        self.monitor.seal(Sealed {
            names: matches!(found, Some(Found::By(_))),
            uapi: control.leave_sockets(),
        })?;
        let keep = match self.options.userspace {
            Some(_) => Keep::Only(vec![Capability::CAP_NET_BIND_SERVICE]),
            None => Keep::AndNetAdmin(capabilities(self.config, self.is_configured)),
        };
        give_up_privileges(self.config, &keep, identity, &mut *self.observer)?;
        node.confinement = Some(confine(&Needs {
            packets: is_transparent(self.config),
            folders: kept.iter().map(|kept| kept.inside("")).collect(),
            files: Vec::new(),
        }));
        let observer = RefCell::new(&mut *self.observer);
        let warn = || Box::new(|warning| observer.borrow_mut().warn(warning));
        let mut services = Services {
            control,
            monitor: &self.monitor,
            reloads: !self.options.reload.is_empty(),
            has_monitor: true,
            network: NetworkMonitor::new(self.config, std::mem::take(&mut self.settings), node)?,
            watch: if node.gateway.is_some() {
                Some(LanMonitor::new(node)?)
            } else {
                None
            },
            mesh: match (&self.config.mesh, &kept) {
                (Some(settings), Some(kept)) => {
                    let names = self.names.as_mut();
                    let state = kept.inside("");
                    let web_proxies = self.web_proxies.clone();
                    let started = Mesh::start(
                        self.config,
                        settings,
                        &state,
                        node,
                        names,
                        web_proxies,
                        warn(),
                    );
                    Some(started?)
                }
                _ => None,
            },
        };
        if let (Some(own), Some(end)) = (&self.options.userspace, self.stack_end.take()) {
            // Buffers are of up to 4 MiB; an idle stack should have none.
            seikan_sys::memory::return_large_blocks();
            let members = services.mesh.as_ref().map(Mesh::names);
            node.stack = Some(Stack::start(
                self.config,
                own,
                end,
                node.tunnel.inner_mtu(),
                members,
            )?);
        }
        let listeners = node.stack.iter().flat_map(Stack::listeners);
        let summary = UpSummary {
            interface: self.config.name.to_string(),
            protocol: self.config.protocol,
            port: node.sockets.port(),
            mtu: match node.tun.index() {
                Some(index) => self.netlink.link_by_index(index)?.mtu,
                None => node.tunnel.inner_mtu(),
            },
            listeners: listeners.copied().collect(),
        };
        if observer.borrow_mut().is_up(&summary).is_err() {
            return Ok(Ended::Requested);
        }
        self.was_up = true;
        node.former.resume_configured(&mut node.tunnel);
        let ended = worker::run(node, Some(self.signals), &mut services);
        if let Some(mesh) = services.mesh.take() {
            mesh.end(node);
        }
        let is_kept = services.has_monitor;
        drop(services);
        node.leave_election();
        let ended = ended?;
        if is_kept {
            Ok(ended)
        } else {
            Err(MonitorError::Gone(io::ErrorKind::UnexpectedEof.into()).into())
        }
    }

    /// Performs the steps of `down`, from whatever state. Failures are reported and skipped.
    fn tear_down(&mut self) {
        // As after a failed `up` of wg-quick, the file stays as it is unless the tunnel was up.
        let saves = self.config.save_config && self.was_up;
        let node = self.node.as_ref();
        let mut failures = self.monitor.leave(Leaving {
            running: node
                .filter(|_| saves)
                .map(|node| Box::new(Running::of(node, self.chosen_mark))),
            // Other programs configure such an interface anew.
            former: node
                .filter(|_| self.is_configured)
                .map(|node| FormerSessions::of(&node.tunnel))
                .unwrap_or_default(),
        });
        self.node = None; // the interface, its addresses and its routes go with it
        failures.extend(self.monitor.end());
        for failure in failures {
            let name = self.config.name.as_str();
            self.observer
                .warn(Diagnostic::new(Severity::Warning, name, failure));
        }
    }

    fn is_interrupted(&mut self) -> bool {
        matches!(
            self.signals.next(),
            Ok(Some(Signal::Interrupt | Signal::Terminate))
        )
    }

    /// Waits for a signal that ends the tunnel.
    fn is_interrupted_within(&mut self, time: Duration) -> bool {
        let until = Instant::now() + time;
        while !self.is_interrupted() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
        true
    }

    /// Adds the information of procfs to an error.
    fn explain(&self, error: NodeError) -> UpError {
        match error {
            NodeError::Udp(UdpError::PortInUse { address }) => UpError::PortInUse {
                port: address.port(),
                holder: occupied::port_holder(address.port()),
            },
            NodeError::Tun(TunError::Exists { .. }) => check_conflicts(self.config, &self.netlink)
                .err()
                .unwrap_or(UpError::Node(error)),
            error => UpError::Node(error),
        }
    }
}

/// Opens the directory of the mesh's state and makes the daemon's user its owner; also loads the system's root
/// certificates. If the directory cannot be given to `identity`, because this namespace has no such user or a
/// capability is missing, the daemon keeps its user.
fn open_kept(
    dirs: &RuntimeDirs,
    config: &Config,
    identity: &mut Option<Identity>,
    observer: &mut dyn Observer,
) -> Result<Folder, UpError> {
    client::roots();
    let path = dirs.state.join(config.name.as_str());
    let given = Folder::give(&path, *identity);
    let is_refused = |error: &io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied
        )
    };
    let given = match given {
        Err(error) if identity.is_some() && is_refused(&error) => {
            *identity = None;
            let warning = Diagnostic::new(
                Severity::Warning,
                config.name.as_str(),
                format!(
                    "cannot give {} to the daemon's user: {error}",
                    path.display()
                ),
            );
            observer.warn(warning.with_help(STAYS_ROOT));
            Folder::give(&path, None)
        }
        other => other,
    };
    given.map_err(|source| UpError::Kept { path, source })
}

/// Help text of the warning that the daemon stays root.
const STAYS_ROOT: &str = "the tunnel works, but an attacker who takes it over could open files of root: grant \
                          CAP_SETUID, CAP_SETGID, CAP_SETPCAP and CAP_CHOWN";

/// Capabilities that a daemon keeps.
enum Keep {
    /// Keep these and `CAP_NET_ADMIN`.
    AndNetAdmin(Vec<Capability>),
    /// Keep only these, as far as the process has them.
    Only(Vec<Capability>),
}

/// Switches to a user of its own with few capabilities.
fn give_up_privileges(
    config: &Config,
    keep: &Keep,
    identity: Option<Identity>,
    observer: &mut dyn Observer,
) -> Result<(), UpError> {
    let drop_to = |identity| match keep {
        Keep::Only(these) => privilege::keep_only(these, identity),
        // A missing capability cannot be kept, and the tunnel itself does not need it.
        Keep::AndNetAdmin(these) => match privilege::drop_to(these, identity) {
            Err(PrivilegeError::Missing { .. }) => privilege::drop_to(&[], identity),
            other => other,
        },
    };
    match drop_to(identity) {
        // The process runs in a user namespace without that user, or without the capabilities.
        Err(error @ PrivilegeError::Become { .. }) => {
            let warning =
                Diagnostic::new(Severity::Warning, config.name.as_str(), error.to_string());
            observer.warn(warning.with_help(STAYS_ROOT));
            Ok(drop_to(None)?)
        }
        other => Ok(other?),
    }
}

/// Returns the capabilities to keep besides `CAP_NET_ADMIN`, which later sockets (on another port, or to
/// relays) need for their mark and buffer sizes.
fn capabilities(config: &Config, is_configured: bool) -> Vec<Capability> {
    let mut kept = Vec::new();
    let is_reserved = |port: u16| (1..1024).contains(&port);
    // `wg setconf` sets the port of an interface that other programs configure.
    if !is_configured || config.listen_port.is_some_and(is_reserved) {
        kept.push(Capability::CAP_NET_BIND_SERVICE); // `wg set` may move it and back
    }
    if is_transparent(config) {
        kept.push(Capability::CAP_NET_RAW); // an interface that was removed and inserted again
    }
    kept
}

fn is_transparent(config: &Config) -> bool {
    let transparent = |g: &GatewaySettings| g.mode == GatewayMode::Transparent;
    config.gateway.as_ref().is_some_and(transparent)
}

/// All services of the worker's loop.
struct Services<'a> {
    control: &'a mut Control,
    monitor: &'a Monitor,
    /// SIGHUP applies a changed file.
    reloads: bool,
    /// The monitor has not ended.
    has_monitor: bool,
    network: NetworkMonitor,
    watch: Option<LanMonitor>,
    mesh: Option<Mesh<'a>>,
}

impl Service for Services<'_> {
    fn hang_up(&mut self) {
        if !self.reloads {
            return;
        }
        for failure in self.monitor.reload() {
            warn!(target: "tunnel", "{failure}");
        }
    }

    fn start(&mut self, epoll: &Epoll) -> io::Result<()> {
        self.control.start(epoll)?;
        epoll.add(self.monitor.socket(), TOKEN_MONITOR, Interest::Read)?;
        self.network.start(epoll)?;
        if let Some(mesh) = &mut self.mesh {
            mesh.start(epoll)?;
        }
        self.watch
            .iter_mut()
            .try_for_each(|watch| watch.start(epoll))
    }

    fn ready(&mut self, token: u64, epoll: &Epoll, node: &mut Node) -> ControlFlow {
        match (&mut self.watch, &mut self.mesh) {
            // Readable without a request: it has ended.
            _ if token == TOKEN_MONITOR => {
                self.has_monitor = false;
                ControlFlow::Stop
            }
            _ if NetworkMonitor::owns(token) => self.network.ready(token, epoll, node),
            (_, Some(mesh)) if Mesh::owns(token) => mesh.ready(token, epoll, node),
            (Some(watch), _) if LanMonitor::owns(token) => watch.ready(token, epoll, node),
            _ => self.control.ready(token, epoll, node),
        }
    }
}
