//! The monitor's process: fulfils the daemon's requests, and undoes its changes at the end.

use super::reload::{Reload, TOKEN_RELOAD, warn};
use super::{Leaving, Reply, Request, Sealed, receive, send};
use crate::journal::change::Change;
use crate::journal::{Journal, Notes};
use crate::options::UpOptions;
use crate::save;
use crate::setup::forwarding::Upkeep;
use crate::setup::hooks::{self, Moment};
use crate::setup::{Recorder, names};
use seikan_config::{Config, GatewayMode};
use seikan_sys::netlink::{Event, Group, Netlink, Subscription};
use seikan_sys::poll::{Epoll, Interest};
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Interval between two checks of resolv.conf.
const KEEP_EVERY: Duration = Duration::from_secs(5);

const TOKEN_DAEMON: u64 = 0;
const TOKEN_INTERFACE: u64 = 1;

/// The monitor in its own process.
pub(super) struct Keeper<'a> {
    config: &'a Config,
    options: &'a UpOptions,
    journal: Journal,
    pub reload: Reload,
    /// The last hook of the start that was run.
    pub reached: Option<Moment>,
    sealed: Option<Sealed>,
    has_left: bool,
    has_ended: bool,
}

impl<'a> Keeper<'a> {
    pub fn new(config: &'a Config, options: &'a UpOptions, journal: Journal) -> Keeper<'a> {
        Keeper {
            config,
            options,
            journal,
            reload: Reload::default(),
            reached: None,
            sealed: None,
            has_left: false,
            has_ended: false,
        }
    }

    /// Fulfils the daemon's requests until it ends or sends an invalid one, and then undoes the rest.
    pub fn serve(mut self, socket: &UnixStream) {
        let _ = self.converse(socket);
        if !self.has_left {
            self.leave(&Leaving::default());
        }
        if !self.has_ended {
            self.end();
        }
    }

    fn converse(&mut self, socket: &UnixStream) -> io::Result<()> {
        let mut epoll = Epoll::new(3)?;
        epoll.add(socket, TOKEN_DAEMON, Interest::Read)?;
        let mut gateway_interface = None;
        while !self.has_ended {
            let is_sealed = self.sealed.is_some() && !self.has_left;
            let keeps_names = is_sealed && self.sealed.is_some_and(|sealed| sealed.names);
            let until_late = self.reload.end_if_late(Instant::now());
            let timeouts = [keeps_names.then_some(KEEP_EVERY), until_late];
            let events = epoll.wait(timeouts.into_iter().flatten().min())?;
            let tokens: Vec<u64> = events.map(|event| event.token).collect();
            if tokens.is_empty() && keeps_names {
                names::keep(self.config);
            }
            if tokens.contains(&TOKEN_INTERFACE)
                && let Some(gateway_interface) = &mut gateway_interface
            {
                self.look_after(gateway_interface);
            }
            if tokens.contains(&TOKEN_RELOAD) {
                self.reload.has_ended(self.options, &epoll);
            }
            if tokens.contains(&TOKEN_DAEMON) {
                let request = receive::<Request>(socket)?;
                let reply = match request {
                    Some(request) => self.answer(request, &epoll),
                    None => Reply::Refused("not a request".to_owned()),
                };
                send(socket, &reply)?;
                match reply {
                    // A compromised daemon may have sent this.
                    Reply::Refused(reason) if self.sealed.is_some() => {
                        return Err(io::Error::other(reason));
                    }
                    _ => {}
                }
                if gateway_interface.is_none() && self.sealed.is_some() {
                    gateway_interface =
                        GatewayInterface::watch(self.config).filter(|gateway_interface| {
                            epoll
                                .add(&gateway_interface.network, TOKEN_INTERFACE, Interest::Read)
                                .is_ok()
                        });
                }
            }
        }
        Ok(())
    }

    fn answer(&mut self, request: Request, epoll: &Epoll) -> Reply {
        let refused = |reason: &str| Reply::Refused(reason.to_owned());
        match request {
            Request::Note(_) | Request::Run(_) | Request::Seal(_) if self.sealed.is_some() => {
                refused("the tunnel is set up")
            }
            Request::Note(change) if !change.is_of(self.config) => {
                refused("the configuration does not ask for this change")
            }
            Request::Note(change) => self.note(change),
            Request::Run(moment @ (Moment::PreUp | Moment::PostUp))
                if self.reached < Some(moment) =>
            {
                self.run_start_hook(moment)
            }
            Request::Seal(sealed) => {
                self.sealed = Some(sealed);
                Reply::Done
            }
            Request::Reload if self.sealed.is_some() && !self.has_left => {
                let begun = self.reload.begin(self.options, epoll);
                Reply::Failures(begun.err().into_iter().collect())
            }
            Request::Leave(leaving) if !self.has_left => Reply::Failures(self.leave(&leaving)),
            Request::End if self.has_left && !self.has_ended => {
                let failures = self.end();
                // The daemon still runs and holds the name, so these files are not a successor's.
                if let Some(sealed) = self.sealed {
                    self.remove_sockets(sealed);
                }
                Reply::Failures(failures)
            }
            Request::Run(_) | Request::Reload | Request::Leave(_) | Request::End => {
                refused("the request comes at the wrong time")
            }
        }
    }

    fn note(&mut self, change: Change) -> Reply {
        let noted = Notes::will_do(&mut self.journal, change);
        Reply::Failures(noted.err().into_iter().collect())
    }

    fn run_start_hook(&mut self, moment: Moment) -> Reply {
        if !self.config.hooks.is_empty() {
            // If both processes were killed, the next note would report the missing clean-up.
            let _ = Notes::will_do(&mut self.journal, Change::Hooks);
        }
        // Set before the hooks run: if one fails half-way, the hooks of the end undo its effects.
        self.reached = Some(moment);
        match hooks::run(self.config, moment) {
            Ok(()) => Reply::Done,
            Err(error) => Reply::Hook(error.into()),
        }
    }

    pub fn leave(&mut self, leaving: &Leaving) -> Vec<String> {
        self.has_left = true;
        // A reload would change the tunnel that ends.
        self.reload = Reload::default();
        // If the note cannot be written, peers notice the restart by themselves.
        let _ = leaving
            .former
            .write(&self.options.dirs.former(self.config.name.as_str()));
        let mut failures = Vec::new();
        if self.sealed.is_some_and(|sealed| sealed.names) {
            names::take_back(self.config);
        }
        if self.reached == Some(Moment::PostUp) {
            let run = hooks::run(self.config, Moment::PreDown);
            failures.extend(run.err().map(|error| error.to_string()));
        }
        if let (true, Some(running), Some(file)) = (
            self.config.save_config,
            &leaving.running,
            &self.options.config_file,
        ) {
            let saved = running.merged_into(self.config).map_err(|e| e.to_string());
            let saved =
                saved.and_then(|config| save::save(&config, file).map_err(|e| e.to_string()));
            failures.extend(saved.err());
        }
        failures
    }

    pub fn end(&mut self) -> Vec<String> {
        let mut failures = self.journal.revert();
        if self.reached.is_some() {
            let run = hooks::run(self.config, Moment::PostDown);
            failures.extend(run.err().map(|error| error.to_string()));
        }
        // Last: after a killed daemon, only the lock keeps the next instance from running its hooks meanwhile.
        self.journal.close();
        self.has_ended = true;
        failures
    }

    fn remove_sockets(&self, sealed: Sealed) {
        let name = self.config.name.as_str();
        let uapi = sealed.uapi.then(|| self.options.dirs.uapi(name));
        let own = [
            self.options.dirs.control(name),
            self.options.dirs.lock(name),
        ];
        // The lock last: without it, no instance is running.
        for path in uapi.into_iter().chain(own) {
            let _ = fs::remove_file(path);
        }
    }

    fn look_after(&mut self, gateway_interface: &mut GatewayInterface<'_>) {
        if gateway_interface.has_changed() {
            let mut recorder = Recorder {
                journal: &mut self.journal,
                warn: &mut warn,
            };
            let GatewayInterface {
                upkeep, netlink, ..
            } = gateway_interface;
            upkeep.look(netlink, &mut recorder);
        }
    }
}

/// The interface of a routed gateway's local network.
struct GatewayInterface<'a> {
    network: Subscription,
    netlink: Netlink,
    upkeep: Upkeep<'a>,
}

impl<'a> GatewayInterface<'a> {
    /// Starts watching, for a routed gateway.
    fn watch(config: &'a Config) -> Option<GatewayInterface<'a>> {
        let settings = config.gateway.as_ref();
        let settings = settings.filter(|gateway| gateway.mode == GatewayMode::Routed)?;
        let netlink = Netlink::open().ok()?;
        Some(GatewayInterface {
            network: Netlink::subscribe(&[Group::Link]).ok()?,
            upkeep: Upkeep::new(settings, &netlink).ok()?,
            netlink,
        })
    }

    /// Reads events; returns true if the interface may have been replaced.
    fn has_changed(&mut self) -> bool {
        let mut changed = false;
        // An error of the socket is no event; read the next one.
        while let Ok(Some(event)) = self.network.next_event() {
            let removed = match event {
                Event::Link(link) => {
                    changed |= link.name == self.upkeep.interface();
                    false
                }
                Event::LinkRemoved(link) => link.name == self.upkeep.interface(),
                // The lost event may have been that.
                Event::Lost => true,
                _ => false,
            };
            if removed {
                self.upkeep.interface_removed();
            }
            changed |= removed;
        }
        changed
    }
}
