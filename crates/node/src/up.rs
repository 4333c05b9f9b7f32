//! From a configuration to a running tunnel, and back to nothing.
//!
//! Up, in this order: the control sockets, and with them the name; the journal and what a killed
//! instance left; is anything in the way ([`in_the_way`]); the hook process; `PreUp`; the plan of routes; the interface with its sockets;
//! addresses, MTU, up; name servers; routes, rules, firewall; `PostUp`; the names of a mesh. Then privileges are dropped
//! to `CAP_NET_ADMIN`, and the worker runs. Down in reverse: `PreDown`, `SaveConfig`, the interface,
//! everything in the journal, `PostDown`. A failure or a signal half way goes down from there.
//!
//! # Privileges
//!
//! What has to be done at the end needs no more than what is kept: rules, `net.` sysctls and
//! nftables ask for `CAP_NET_ADMIN`; resolvconf(8) and the file that `SaveConfig` writes belong to
//! root, which the daemon's user still is, without being able to override permissions. Hooks may
//! need anything, so the process that was forked for them before keeps everything; it takes no
//! input but the number of a command that was fixed at the start. `CAP_DAC_OVERRIDE` is kept only if
//! `SaveConfig` has to write into a folder that is not its user's.

use crate::config::{Config, Diagnostic, GatewayMode, GatewaySettings, Host, Severity};
use crate::control::{Control, ControlError, Places};
use crate::gateway::{GatewayNode, LanError, Watch};
use crate::life::{Life, LifeError};
use crate::mesh::{Mesh, MeshError};
use crate::node::{Node, NodeError, resolve};
use crate::save;
use crate::setup::forwarding::Upkeep;
use crate::setup::hooks::{HookError, Hooks, Moment};
use crate::setup::names::Names;
use crate::setup::{self, Change, firewall, forwarding, mtu, occupied, routes};
use crate::state::{self, Journal, StateError};
use crate::worker::{self, Ended, Service, Verdict};
use seikan_sys::dns::DnsError;
use seikan_sys::netlink::{Netlink, NetlinkError};
use seikan_sys::poll::Epoll;
use seikan_sys::privilege::{self, Capability, PrivilegeError};
use seikan_sys::signal::{Signal, Signals};
use seikan_sys::tun::TunError;
use seikan_sys::udp::UdpError;
use std::cell::RefCell;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Why `up` failed. Everything made until then was taken back.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    /// The node.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Interface set-up.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Signals.
    #[error("cannot block signals: {0}")]
    Signals(io::Error),
    /// Another instance runs, or there can be no control socket.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// What an earlier instance left is in the way.
    #[error(transparent)]
    State(#[from] StateError),
    /// A command of the configuration.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// Name servers.
    #[error(transparent)]
    Dns(#[from] DnsError),
    /// Privileges.
    #[error(transparent)]
    Privilege(#[from] PrivilegeError),
    /// The network cannot be watched.
    #[error(transparent)]
    Life(#[from] LifeError),
    /// This host cannot take part in its mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The gateway's side of the local network.
    #[error(transparent)]
    Lan(#[from] LanError),
    /// The process may not do it.
    #[error(
        "bringing up interface {interface} takes CAP_NET_ADMIN, which this process lacks: run it \
         with sudo, or once `setcap cap_net_admin+ep` on the program"
    )]
    NotPermitted {
        /// Which interface.
        interface: String,
    },
    /// The name is taken.
    #[error("interface {interface} exists already: {what}")]
    InterfaceExists {
        /// Which interface.
        interface: String,
        /// What it is, and what to do.
        what: String,
    },
    /// The port is taken.
    #[error(
        "UDP port {port} is in use by {holder}: choose another `ListenPort`, or stop that first"
    )]
    PortInUse {
        /// Which port.
        port: u16,
        /// By whom.
        holder: String,
    },
    /// The interface vanished while the tunnel ran.
    #[error(
        "interface {interface} was deleted under the tunnel, which ended; start it again, and see \
         who deleted it"
    )]
    InterfaceGone {
        /// Which interface.
        interface: String,
    },
}

/// What a tunnel is when it is up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpSummary {
    /// The interface.
    pub interface: String,
    /// The wire protocol.
    pub protocol: crate::config::Protocol,
    /// The UDP port of both families.
    pub port: u16,
    /// The MTU inside the tunnel.
    pub mtu: u32,
}

/// Told how things go.
pub trait Observer {
    /// Something is odd, but the tunnel goes on.
    fn warn(&mut self, warning: Diagnostic);
    /// The interface carries traffic. With an error the tunnel ends again: nobody knows of it.
    fn is_up(&mut self, summary: &UpSummary) -> io::Result<()>;
    /// The tunnel was asked to end.
    fn is_stopping(&mut self);
}

/// What `up` needs to know beside the configuration.
#[derive(Debug, Clone)]
pub struct UpOptions {
    /// Where `SaveConfig` writes.
    pub config_file: Option<PathBuf>,
    /// Where the control sockets and the journal are.
    pub places: Places,
    /// Give up all privileges but `CAP_NET_ADMIN` once everything is set up.
    pub drop_privileges: bool,
}

impl Default for UpOptions {
    fn default() -> Self {
        UpOptions {
            config_file: None,
            places: Places::default(),
            drop_privileges: true,
        }
    }
}

/// Brings the interface up and runs until told to stop.
///
/// The process must still have one thread: one that has more, such as a test, can have no hooks and
/// has to keep its privileges.
pub fn up(
    config: &Config,
    options: &UpOptions,
    observer: &mut dyn Observer,
) -> Result<(), UpError> {
    let signals = Signals::block().map_err(UpError::Signals)?;
    let netlink = Netlink::open()?;
    if !privilege::has_net_admin() {
        return Err(UpError::NotPermitted {
            interface: config.name.to_string(),
        });
    }
    // Declared first, so that it goes last: until then the name is taken.
    let mut control = Control::at(&options.places, config)?;
    let journal = open_journal(config, options, observer)?;
    in_the_way(config, &netlink)?;
    let hooks = Hooks::start(config, journal.path().map(Path::to_owned))?;
    let mut work = Work {
        config,
        options,
        observer,
        signals: &signals,
        netlink,
        journal,
        hooks,
        node: None,
        names: None,
        reached: None,
    };
    let outcome = work.bring_up().and_then(|()| work.run(&mut control));
    work.tear_down();
    drop(work);
    match outcome? {
        Ended::Asked => Ok(()),
        Ended::InterfaceGone => Err(UpError::InterfaceGone {
            interface: config.name.to_string(),
        }),
    }
}

/// Takes the lock, and takes back what a killed instance left.
fn open_journal(
    config: &Config,
    options: &UpOptions,
    observer: &mut dyn Observer,
) -> Result<Journal, UpError> {
    let (journal, left) = match Journal::open(&options.places.run, config.name.as_str()) {
        Ok(opened) => opened,
        Err(error @ StateError::Locked { .. }) => return Err(error.into()),
        Err(error) => {
            observer.warn(setup::without_journal(&error.to_string()));
            (Journal::in_memory(), Vec::new())
        }
    };
    if !left.is_empty() {
        let name = config.name.as_str();
        let message = "an earlier tunnel of this name was killed; what it left was taken back";
        let mut warning = Diagnostic::new(Severity::Warning, name, message);
        if left.contains(&Change::Hooks) {
            warning = warning.with_help(
                "but for its hooks: see whether its PreDown and PostDown commands have to be run",
            );
        }
        observer.warn(warning);
        for failure in state::take_back(left) {
            observer.warn(Diagnostic::new(Severity::Warning, name, failure));
        }
    }
    Ok(journal)
}

/// What can be known to be in the way before any hook has run.
fn in_the_way(config: &Config, netlink: &Netlink) -> Result<(), UpError> {
    let interface = config.name.to_string();
    let Some(index) = netlink.link_index(&interface)? else {
        return Ok(());
    };
    let kind = netlink.link_by_index(index).map(|link| link.kind);
    let what = match (
        occupied::tun_holder(&interface),
        kind.unwrap_or_default().as_str(),
    ) {
        (Some(holder), _) => {
            format!("{holder} runs it; stop that first, or name the configuration's file otherwise")
        }
        (None, "tun") => format!(
            "a TUN device that no process holds; if it is a left-over, remove it with \
             `ip link delete {interface}`"
        ),
        (None, "wireguard") => format!(
            "the kernel's WireGuard runs it; stop that first with `wg-quick down {interface}` or \
             `ip link delete {interface}`"
        ),
        (None, kind) => format!(
            "it is {}; name the configuration's file otherwise",
            if kind.is_empty() {
                "a network card".to_owned()
            } else {
                format!("a {kind} device")
            }
        ),
    };
    Err(UpError::InterfaceExists { interface, what })
}

/// A tunnel on its way up or down. The journal comes before the hooks: should this process panic,
/// its lock is free when the hook process, which is then waited for, wants to clean up.
struct Work<'a> {
    config: &'a Config,
    options: &'a UpOptions,
    observer: &'a mut dyn Observer,
    signals: &'a Signals,
    netlink: Netlink,
    journal: Journal,
    node: Option<Node>,
    /// Names of members, if this host is one.
    names: Option<Names>,
    /// How far the hooks have come on the way up.
    reached: Option<Moment>,
    hooks: Hooks,
}

impl Work<'_> {
    /// All of the way up; leaves early, without a node, if a signal says so.
    fn bring_up(&mut self) -> Result<(), UpError> {
        if !self.hooks.is_empty() {
            let observer = &mut *self.observer;
            setup::note(&mut self.journal, Change::Hooks, &mut |w| observer.warn(w));
        }
        self.reached = Some(Moment::PreUp);
        self.hooks.run(Moment::PreUp)?;
        if self.is_interrupted() {
            return Ok(());
        }
        let (mut config, endpoints) = self.resolved();
        let plan = routes::plan(&config, &endpoints, &self.netlink)?;
        config.fwmark = plan.mark;
        config.mtu = Some(mtu::inner_mtu(
            &config,
            &endpoints,
            plan.mark,
            &self.netlink,
        ));
        let node = Node::create(&config).map_err(|error| self.explain(error))?;
        let index = node.tun.index();
        self.node = Some(node);
        setup::set_up_interface(&config, index, &self.netlink)?;
        let observer = &mut *self.observer;
        let mut warn = |warning| observer.warn(warning);
        setup::set_dns(&config, &mut self.journal, &mut warn)?;
        setup::set_routes(&plan, index, &self.netlink, &mut self.journal, &mut warn)?;
        if let Some(mark) = plan.own_table() {
            firewall::apply(&config, mark, &mut self.journal, &mut warn);
        }
        self.open_gateway(&config)?;
        if self.is_interrupted() {
            return Ok(());
        }
        self.reached = Some(Moment::PostUp);
        self.hooks.run(Moment::PostUp)?;
        if config.mesh.is_some() {
            // After the hooks: until the thread of the mesh runs, nobody answers.
            let observer = &mut *self.observer;
            let mut warn = |warning| observer.warn(warning);
            self.names = Some(Names::set(&config, &mut self.journal, &mut warn));
        }
        Ok(())
    }

    /// The gateway, if this is one: its card, or what the kernel needs to forward.
    fn open_gateway(&mut self, config: &Config) -> Result<(), UpError> {
        let (Some(settings), Some(node)) = (&config.gateway, &mut self.node) else {
            return Ok(());
        };
        let mtu = config.mtu.unwrap_or(crate::node::DEFAULT_MTU);
        let identity = node.tunnel.identity();
        let gateway = GatewayNode::open(config, settings, identity, mtu, &self.netlink)?;
        node.gateway = Some(gateway);
        if settings.mode == GatewayMode::Routed {
            let observer = &mut *self.observer;
            let mut warn = |warning| observer.warn(warning);
            let tun = node.tun.index();
            forwarding::apply(
                config,
                settings,
                tun,
                &self.netlink,
                &mut self.journal,
                &mut warn,
            )?;
        }
        Ok(())
    }

    /// The worker's life, unless a signal came before it.
    fn run(&mut self, control: &mut Control) -> Result<Ended, UpError> {
        let interrupted = self.is_interrupted();
        let Some(node) = self.node.as_mut().filter(|_| !interrupted) else {
            return Ok(Ended::Asked);
        };
        if self.options.drop_privileges {
            match privilege::drop_to(&kept(self.config, self.options)) {
                // What is not there cannot be kept, and is not needed for the tunnel itself.
                Err(PrivilegeError::Missing { .. }) => privilege::drop_to(&[])?,
                other => other?,
            }
        }
        let observer = RefCell::new(&mut *self.observer);
        let warn = || Box::new(|warning| observer.borrow_mut().warn(warning));
        let mut services = Services {
            control,
            life: Life::new(self.config, node)?,
            watch: match node.gateway.is_some() {
                true => Some(Watch::new(node)?),
                false => None,
            },
            mesh: match &self.config.mesh {
                Some(settings) => {
                    let state = &self.options.places.state;
                    let names = self.names.as_mut();
                    let started = Mesh::start(self.config, settings, state, node, names, warn());
                    Some(started?)
                }
                None => None,
            },
        };
        let summary = UpSummary {
            interface: self.config.name.to_string(),
            protocol: self.config.protocol,
            port: node.sockets.port(),
            mtu: self.netlink.link_by_index(node.tun.index())?.mtu,
        };
        if observer.borrow_mut().is_up(&summary).is_err() {
            return Ok(Ended::Asked);
        }
        let routed = |g: &&GatewaySettings| g.mode == GatewayMode::Routed;
        if let (Some(watch), Some(settings)) = (
            &mut services.watch,
            self.config.gateway.as_ref().filter(routed),
        ) {
            let upkeep = Upkeep::new(settings, &self.netlink, &mut self.journal, warn())?;
            watch.keep_up(upkeep);
        }
        let ended = worker::run(node, self.signals, &mut services)?;
        if let Some(mesh) = services.mesh.take() {
            mesh.end(node);
        }
        drop(services);
        node.leave_election();
        self.observer.is_stopping();
        Ok(ended)
    }

    /// All of the way down, from wherever the way up ended. Failures are told and passed over.
    fn tear_down(&mut self) {
        let mut failures = Vec::new();
        if let Some(names) = self.names.take() {
            names.take_back();
        }
        let hooks = |moment, hooks: &mut Hooks| hooks.run(moment).map_err(|e| e.to_string());
        if self.reached == Some(Moment::PostUp) {
            failures.extend(hooks(Moment::PreDown, &mut self.hooks).err());
        }
        if let (Some(node), Some(file)) = (&self.node, &self.options.config_file)
            && self.config.save_config
        {
            let saved = save::save(&save::running(self.config, node), file);
            failures.extend(saved.err().map(|error| error.to_string()));
        }
        self.node = None; // the interface, its addresses and its routes go with it
        failures.extend(self.journal.take_back());
        if self.reached.is_some() {
            failures.extend(hooks(Moment::PostDown, &mut self.hooks).err());
        }
        for failure in failures {
            let name = self.config.name.as_str();
            self.observer
                .warn(Diagnostic::new(Severity::Warning, name, failure));
        }
    }

    /// The configuration with addresses for names. A name that cannot be resolved now, as when the
    /// host is booting, is tried again while the tunnel runs.
    fn resolved(&mut self) -> (Config, Vec<IpAddr>) {
        let mut config = self.config.clone();
        let mut endpoints = Vec::new();
        for peer in &mut config.peers {
            let Some(endpoint) = &mut peer.endpoint else {
                continue;
            };
            match resolve(&endpoint.host, endpoint.port) {
                Ok(address) => {
                    // A link-local address keeps its name: only that has the scope.
                    if !matches!(address, std::net::SocketAddr::V6(v6) if v6.scope_id() != 0) {
                        endpoint.host = Host::Address(address.ip());
                    }
                    endpoints.push(address.ip());
                }
                Err(error) => {
                    let warning = Diagnostic::new(
                        Severity::Warning,
                        self.config.name.as_str(),
                        error.to_string(),
                    );
                    let help = "the tunnel goes up without this peer's address, and asks again \
                                every few seconds";
                    self.observer.warn(warning.with_help(help));
                    peer.endpoint = None;
                }
            }
        }
        (config, endpoints)
    }

    fn is_interrupted(&mut self) -> bool {
        matches!(
            self.signals.next(),
            Ok(Some(Signal::Interrupt | Signal::Terminate))
        )
    }

    /// Adds what procfs knows.
    fn explain(&self, error: NodeError) -> UpError {
        match error {
            NodeError::Udp(UdpError::PortInUse { address }) => UpError::PortInUse {
                port: address.port(),
                holder: occupied::port_holder(address.port()),
            },
            NodeError::Tun(TunError::Exists { .. }) => in_the_way(self.config, &self.netlink)
                .err()
                .unwrap_or(UpError::Node(error)),
            error => UpError::Node(error),
        }
    }
}

/// What is kept beside `CAP_NET_ADMIN`.
fn kept(config: &Config, options: &UpOptions) -> Vec<Capability> {
    let mut kept = Vec::new();
    if config
        .listen_port
        .is_some_and(|port| (1..1024).contains(&port))
    {
        kept.push(Capability::CAP_NET_BIND_SERVICE); // `wg set` may move it and back
    }
    let transparent = |g: &GatewaySettings| g.mode == GatewayMode::Transparent;
    if config.gateway.as_ref().is_some_and(transparent) {
        kept.push(Capability::CAP_NET_RAW); // a card that was taken out and put in again
    }
    if config.save_config && !options.config_file.as_deref().is_none_or(is_writable) {
        kept.push(Capability::CAP_DAC_OVERRIDE);
    }
    kept
}

/// Whether the file's folder belongs to this process's user, who may then write to it.
fn is_writable(file: &Path) -> bool {
    let user = std::fs::metadata("/proc/self").map(|own| own.uid());
    let folder = file.canonicalize().ok();
    let folder = folder.as_deref().and_then(Path::parent);
    folder
        .and_then(|folder| std::fs::metadata(folder).ok())
        .is_none_or(|folder| user.is_ok_and(|user| folder.uid() == user))
}

/// Everything that shares the worker's loop.
struct Services<'a> {
    control: &'a mut Control,
    life: Life,
    watch: Option<Watch<'a>>,
    mesh: Option<Mesh<'a>>,
}

impl Service for Services<'_> {
    fn start(&mut self, epoll: &Epoll) -> io::Result<()> {
        self.control.start(epoll)?;
        self.life.start(epoll)?;
        if let Some(mesh) = &mut self.mesh {
            mesh.start(epoll)?;
        }
        self.watch
            .iter_mut()
            .try_for_each(|watch| watch.start(epoll))
    }

    fn ready(&mut self, token: u64, epoll: &Epoll, node: &mut Node) -> Verdict {
        match (&mut self.watch, &mut self.mesh) {
            _ if Life::owns(token) => self.life.ready(token, epoll, node),
            (_, Some(mesh)) if Mesh::owns(token) => mesh.ready(token, epoll, node),
            (Some(watch), _) if Watch::owns(token) => watch.ready(token, epoll, node),
            _ => self.control.ready(token, epoll, node),
        }
    }
}
