//! The monitor: the part of a tunnel that stays privileged while the daemon faces the network.
//!
//! It is a process of its own, forked before anything is set up ([`Monitor::start`]). It runs the configuration's hooks, keeps the
//! journal of what has to be taken back ([`crate::state`]), and takes it back when the daemon ends, however that ends.
//!
//! While the tunnel is set up the daemon is as privileged as the monitor, and tells it what it changes. [`Monitor::seal`] ends
//! that: from then on the daemon counts as taken over by whoever sends it packets. The monitor then knows two requests, each once:
//! [`Request::Leave`] with the state that `SaveConfig` writes, and [`Request::End`]. Neither names a file, a command, an
//! interface or a sysctl: these are the monitor's own, from the configuration that it was forked with. Any other message has it
//! take everything back and end. What has to be done meanwhile the monitor does without being asked: it keeps the name server of
//! a mesh in resolv.conf, and has a gateway's card forward that was made anew.
//!
//! A message is its length (four bytes, little endian, at most [`MAX_MESSAGE`]) and as much JSON.

use crate::control::socket::Lock;
use crate::control::{ControlError, Places};
use crate::save::{self, Running};
use crate::setup::forwarding::Upkeep;
use crate::setup::hooks::{self, Failure, HookError, Moment};
use crate::setup::{Change, names};
use crate::state::{Journal, Notes, StateError};
use seikan_config::{Config, Diagnostic, Diagnostics, GatewayMode, Severity};
use seikan_sys::monitor as process;
use seikan_sys::netlink::{Event, Group, Netlink, Subscription};
use seikan_sys::poll::{Epoll, Interest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use zeroize::Zeroizing;

/// Longest message, in bytes: the state of some 50,000 peers.
pub const MAX_MESSAGE: u32 = 16 << 20;
/// Interval between two looks at resolv.conf.
const KEEP_EVERY: Duration = Duration::from_secs(5);

const TOKEN_DAEMON: u64 = 0;
const TOKEN_CARD: u64 = 1;

/// What the daemon asks for.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Note a change that is about to be made. Not after [`Request::Seal`].
    Note(Change),
    /// Run the hooks of a moment on the way up. Not after [`Request::Seal`].
    Run(Moment),
    /// The tunnel is set up: take no more orders.
    Seal(Sealed),
    /// Run the hooks before the end, and write the state where the configuration says `SaveConfig`.
    Leave(Option<Box<Running>>),
    /// Take everything back, and run the hooks of the end.
    End,
}

/// What was set up.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sealed {
    /// Members of the mesh are found by their names.
    pub names: bool,
    /// `wg` has a socket.
    pub uapi: bool,
}

/// What the monitor says to that.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// It is done.
    Done,
    /// It is not: the daemon may not ask for it.
    Refused(String),
    /// A hook failed.
    Hook(Failure),
    /// It is done as far as it could be.
    Failures(Vec<String>),
}

/// Why the monitor did not do something.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// There is none.
    #[error("cannot start the monitor, which keeps the tunnel's privileges: {0}")]
    Start(io::Error),
    /// It has ended.
    #[error(
        "the monitor, which keeps the tunnel's privileges, has ended: {0}; run `seikan down` to clean up"
    )]
    Gone(io::Error),
    /// It will not.
    #[error("the monitor refuses: {0}")]
    Refused(String),
    /// A hook.
    #[error(transparent)]
    Hook(#[from] HookError),
}

/// The monitor, as the daemon has it.
#[derive(Debug)]
pub struct Monitor {
    process: process::Monitor,
}

impl Monitor {
    /// Forks it. `config_file` is where `SaveConfig` writes. The journal is the monitor's from now on.
    ///
    /// # Errors
    /// [`MonitorError::Start`].
    pub fn start(
        config: &Config,
        config_file: Option<&Path>,
        places: &Places,
        journal: Journal,
    ) -> Result<Monitor, MonitorError> {
        let file = journal.file();
        let mut journal = Some(journal);
        let process = process::Monitor::start(file.as_slice(), |socket| {
            if let Some(journal) = journal.take() {
                Keeper::new(config, config_file, places, journal).serve(&socket);
            }
        });
        if let Some(journal) = journal.take() {
            journal.leave_to_the_other();
        }
        let process = process.map_err(MonitorError::Start)?;
        Ok(Monitor { process })
    }

    /// The stream to it. It says nothing that it was not asked for, so if there is something to read, it has ended.
    pub fn socket(&self) -> &UnixStream {
        self.process.socket()
    }

    fn ask(&mut self, request: &Request) -> Result<Reply, MonitorError> {
        let asked = send(self.socket(), request).and_then(|()| receive(self.socket()));
        match asked.map_err(MonitorError::Gone)? {
            Some(Reply::Refused(reason)) => Err(MonitorError::Refused(reason)),
            Some(reply) => Ok(reply),
            None => Err(MonitorError::Gone(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Runs the hooks of a moment on the way up.
    ///
    /// # Errors
    /// [`MonitorError::Hook`], or the monitor is gone.
    pub fn run(&mut self, moment: Moment) -> Result<(), MonitorError> {
        match self.ask(&Request::Run(moment))? {
            Reply::Hook(failure) => Err(failure.of(moment).into()),
            _ => Ok(()),
        }
    }

    /// From now on only [`Self::leave`] and [`Self::end`] are done.
    ///
    /// # Errors
    /// The monitor is gone.
    pub fn seal(&mut self, sealed: Sealed) -> Result<(), MonitorError> {
        self.ask(&Request::Seal(sealed)).map(drop)
    }

    /// Runs the hooks before the end and saves the state, if there is one. What could not be done, for people.
    pub fn leave(&mut self, running: Option<Running>) -> Vec<String> {
        self.failures(&Request::Leave(running.map(Box::new)))
    }

    /// Takes everything back and runs the hooks of the end. What could not be done, for people.
    pub fn end(&mut self) -> Vec<String> {
        self.failures(&Request::End)
    }

    fn failures(&mut self, request: &Request) -> Vec<String> {
        match self.ask(request) {
            Ok(Reply::Failures(failures)) => failures,
            Ok(_) => Vec::new(),
            Err(error) => vec![error.to_string()],
        }
    }
}

impl Notes for Monitor {
    fn will_do(&mut self, change: Change) -> Result<(), String> {
        match self.ask(&Request::Note(change)) {
            Ok(Reply::Failures(failures)) => failures.into_iter().next().map_or(Ok(()), Err),
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The monitor's own side.
struct Keeper<'a> {
    config: &'a Config,
    config_file: Option<&'a Path>,
    places: &'a Places,
    journal: Journal,
    /// How far the hooks have come on the way up.
    reached: Option<Moment>,
    sealed: Option<Sealed>,
    has_left: bool,
    has_ended: bool,
}

impl<'a> Keeper<'a> {
    fn new(
        config: &'a Config,
        config_file: Option<&'a Path>,
        places: &'a Places,
        journal: Journal,
    ) -> Keeper<'a> {
        Keeper {
            config,
            config_file,
            places,
            journal,
            reached: None,
            sealed: None,
            has_left: false,
            has_ended: false,
        }
    }

    /// Does what the daemon says until it is gone, or has said what it may not, and then what is left to do.
    fn serve(mut self, socket: &UnixStream) {
        let _ = self.converse(socket);
        if !self.has_left {
            self.leave(None);
        }
        if !self.has_ended {
            self.end();
        }
    }

    fn converse(&mut self, socket: &UnixStream) -> io::Result<()> {
        let mut epoll = Epoll::new(2)?;
        epoll.add(socket, TOKEN_DAEMON, Interest::Read)?;
        let mut card = None;
        while !self.has_ended {
            let is_sealed = self.sealed.is_some() && !self.has_left;
            let keeps_names = is_sealed && self.sealed.is_some_and(|sealed| sealed.names);
            let events = epoll.wait(keeps_names.then_some(KEEP_EVERY))?;
            let tokens: Vec<u64> = events.map(|event| event.token).collect();
            if tokens.is_empty() && keeps_names {
                names::keep(self.config);
            }
            if tokens.contains(&TOKEN_CARD)
                && let Some(card) = &mut card
            {
                self.look_after(card);
            }
            if tokens.contains(&TOKEN_DAEMON) {
                let request = receive::<Request>(socket)?;
                let reply = match request {
                    Some(request) => self.answer(request),
                    None => Reply::Refused("not a request".to_owned()),
                };
                send(socket, &reply)?;
                match reply {
                    // Whoever sends packets to the daemon may have sent this.
                    Reply::Refused(reason) if self.sealed.is_some() => {
                        return Err(io::Error::other(reason));
                    }
                    _ => {}
                }
                if card.is_none() && self.sealed.is_some() {
                    card = Card::watch(self.config).filter(|card| {
                        epoll.add(&card.network, TOKEN_CARD, Interest::Read).is_ok()
                    });
                }
            }
        }
        Ok(())
    }

    fn answer(&mut self, request: Request) -> Reply {
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
                self.run_on_the_way_up(moment)
            }
            Request::Seal(sealed) => {
                self.sealed = Some(sealed);
                Reply::Done
            }
            Request::Leave(running) if !self.has_left => {
                Reply::Failures(self.leave(running.as_deref()))
            }
            Request::End if self.has_left && !self.has_ended => {
                let failures = self.end();
                // The daemon is still there and holds the name, so these are not a successor's.
                if let Some(sealed) = self.sealed {
                    self.remove_sockets(sealed);
                }
                Reply::Failures(failures)
            }
            Request::Run(_) | Request::Leave(_) | Request::End => {
                refused("the request comes at the wrong time")
            }
        }
    }

    fn note(&mut self, change: Change) -> Reply {
        let noted = Notes::will_do(&mut self.journal, change);
        Reply::Failures(noted.err().into_iter().collect())
    }

    fn run_on_the_way_up(&mut self, moment: Moment) -> Reply {
        if !self.config.hooks.is_empty() {
            // That a kill of both processes is made good by nobody is told with the next note.
            let _ = Notes::will_do(&mut self.journal, Change::Hooks);
        }
        // Before they are run: those of the end make good what half of these have done.
        self.reached = Some(moment);
        match hooks::run(self.config, moment) {
            Ok(()) => Reply::Done,
            Err(error) => Reply::Hook(error.into()),
        }
    }

    fn leave(&mut self, running: Option<&Running>) -> Vec<String> {
        self.has_left = true;
        let mut failures = Vec::new();
        if self.sealed.is_some_and(|sealed| sealed.names) {
            names::take_back(self.config);
        }
        if self.reached == Some(Moment::PostUp) {
            let run = hooks::run(self.config, Moment::PreDown);
            failures.extend(run.err().map(|error| error.to_string()));
        }
        if let (true, Some(running), Some(file)) =
            (self.config.save_config, running, self.config_file)
        {
            let saved = running.in_place_of(self.config).map_err(|e| e.to_string());
            let saved =
                saved.and_then(|config| save::save(&config, file).map_err(|e| e.to_string()));
            failures.extend(saved.err());
        }
        failures
    }

    fn end(&mut self) -> Vec<String> {
        let mut failures = self.journal.take_back();
        if self.reached.is_some() {
            let run = hooks::run(self.config, Moment::PostDown);
            failures.extend(run.err().map(|error| error.to_string()));
        }
        self.has_ended = true;
        failures
    }

    fn remove_sockets(&self, sealed: Sealed) {
        let name = self.config.name.as_str();
        let uapi = sealed.uapi.then(|| self.places.uapi(name));
        let own = [self.places.control(name), self.places.lock(name)];
        // The lock last: without it nobody is running.
        for path in uapi.into_iter().chain(own) {
            let _ = fs::remove_file(path);
        }
    }

    fn look_after(&mut self, card: &mut Card<'_>) {
        let journal = &mut self.journal;
        if card.has_changed() {
            card.upkeep
                .look(&card.netlink, journal, &mut |warning| warn(warning));
        }
    }
}

/// The card of a gateway's local network, where the kernel forwards.
struct Card<'a> {
    network: Subscription,
    netlink: Netlink,
    upkeep: Upkeep<'a>,
}

impl<'a> Card<'a> {
    /// Watches it from now on, if there is one to be watched.
    fn watch(config: &'a Config) -> Option<Card<'a>> {
        let settings = config.gateway.as_ref();
        let settings = settings.filter(|gateway| gateway.mode == GatewayMode::Routed)?;
        let netlink = Netlink::open().ok()?;
        Some(Card {
            network: Netlink::subscribe(&[Group::Link]).ok()?,
            upkeep: Upkeep::new(settings, &netlink).ok()?,
            netlink,
        })
    }

    /// Reads events; true if the card may be another one than before.
    fn has_changed(&mut self) -> bool {
        let mut changed = false;
        // An error of the socket is no event; the next is.
        while let Ok(Some(event)) = self.network.next_event() {
            let removed = match event {
                Event::Link(link) => {
                    changed |= link.name == self.upkeep.card();
                    false
                }
                Event::LinkRemoved(link) => link.name == self.upkeep.card(),
                // It may have been that.
                Event::Lost => true,
                _ => false,
            };
            if removed {
                self.upkeep.card_removed();
            }
            changed |= removed;
        }
        changed
    }
}

/// Shows a warning where the daemon shows its own.
fn warn(warning: Diagnostic) {
    let mut warnings = Diagnostics::default();
    warnings.push(warning);
    let _ = io::stderr().write_all(warnings.render(false).as_bytes());
}

fn send(mut socket: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut bytes = Zeroizing::new(vec![0; 4]);
    serde_json::to_writer(&mut *bytes, message)?;
    let length = u32::try_from(bytes.len() - 4).ok();
    let length = length.filter(|length| *length <= MAX_MESSAGE);
    let length = length.ok_or(io::ErrorKind::FileTooLarge)?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    socket.write_all(&bytes)
}

/// The next message; `None` if it is none that this end knows.
fn receive<T: DeserializeOwned>(mut socket: &UnixStream) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE {
        return Ok(None);
    }
    // As much memory as has come.
    let mut bytes = Zeroizing::new(Vec::new());
    let read = socket.take(length.into()).read_to_end(&mut bytes)?;
    if read < length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&bytes).ok())
}

/// Takes back what an instance that was killed has left, with its sockets; `false` if it has left nothing. The hooks of the end
/// are not run. `warn` is told what could not be taken back.
///
/// # Errors
/// Somebody is at it, or the name is in use.
pub fn clean_up(
    places: &Places,
    name: &str,
    warn: &mut dyn FnMut(Diagnostic),
) -> Result<bool, CleanUpError> {
    if !crate::state::is_left(&places.run, name) {
        return Ok(false);
    }
    let _lock = Lock::take(places, name)?;
    let (journal, left) = Journal::open(&places.run, name)?;
    take_back(name, left, warn);
    drop(journal);
    let _ = fs::remove_file(places.control(name));
    // Nobody else's: its owner would answer.
    let uapi = places.uapi(name);
    if UnixStream::connect(&uapi).is_err() {
        let _ = fs::remove_file(uapi);
    }
    Ok(true)
}

/// Why leftovers could not be taken back.
#[derive(Debug, thiserror::Error)]
pub enum CleanUpError {
    /// The name is in use.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The journal is.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Takes back what an earlier instance has left, and says so. What no tunnel of this name changes is not touched, whoever wrote it
/// into the journal.
pub fn take_back(name: &str, left: Vec<Change>, warn: &mut dyn FnMut(Diagnostic)) {
    let (left, foreign): (Vec<_>, Vec<_>) =
        left.into_iter().partition(|change| change.may_be_of(name));
    if !foreign.is_empty() {
        let message = format!(
            "the journal of an earlier tunnel lists {} changes that a tunnel of this name never makes; they were not undone",
            foreign.len()
        );
        let warning = Diagnostic::new(Severity::Warning, name, message);
        warn(warning.with_help("only root can write the journal: find out who did"));
    }
    if left.is_empty() {
        return;
    }
    let message = "an earlier tunnel of this name was killed; its changes were undone";
    let mut warning = Diagnostic::new(Severity::Warning, name, message);
    if left.contains(&Change::Hooks) {
        warning = warning.with_help(
            "its hooks did not run: check whether its PreDown and PostDown commands are needed",
        );
    }
    warn(warning);
    for failure in crate::state::take_back(left) {
        warn(Diagnostic::new(Severity::Warning, name, failure));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_config::{Overrides, Source, Syntax, parse};
    use std::net::Shutdown;

    fn config(hooks: &str) -> Config {
        let key = "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEA=";
        let text = format!("[Interface]\nPrivateKey = {key}\nAddress = 10.0.0.1/24\n{hooks}");
        let source = Source {
            file: "wg0.conf".into(),
            syntax: Syntax::Ini,
            text: Zeroizing::new(text),
        };
        let parsed = parse(&source, &Overrides::default(), &|_| unreachable!());
        parsed.config.expect("a configuration")
    }

    /// What the monitor answers to these bytes after the requests, and what is then in the folder.
    fn answers(requests: &[Request], bytes: &[u8]) -> (Vec<String>, Vec<String>) {
        let folder = tempfile::tempdir().expect("folder");
        let mark = folder.path().join("mark");
        let config = config(&format!("PostDown = touch {}", mark.display()));
        let places = Places {
            run: folder.path().to_owned(),
            wireguard: folder.path().join("wireguard"),
            state: folder.path().join("state"),
        };
        let (journal, _) = Journal::open(&places.run, "wg0").expect("journal");
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let answers = std::thread::scope(|scope| {
            let (config, places) = (&config, &places);
            scope.spawn(move || Keeper::new(config, None, places, journal).serve(&theirs));
            for request in requests {
                send(&ours, request).expect("sent");
            }
            let _ = (&ours).write_all(bytes);
            let _ = ours.shutdown(Shutdown::Write);
            let mut answers = Vec::new();
            while let Ok(Some(reply)) = receive::<serde_json::Value>(&ours) {
                answers.push(reply.to_string());
            }
            answers
        });
        let entries = fs::read_dir(folder.path()).expect("folder").flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        (answers, names.collect())
    }

    fn message(text: &str) -> Vec<u8> {
        let length = u32::try_from(text.len()).expect("short");
        [&length.to_le_bytes(), text.as_bytes()].concat()
    }

    const SEALED: Request = Request::Seal(Sealed {
        names: false,
        uapi: false,
    });

    #[test]
    fn a_forged_request_is_refused_and_ends_the_conversation() {
        let forged = [
            r#"{"note":{"sysctl":{"path":"/proc/sys/net/ipv4/ip_default_ttl","before":"64"}}}"#,
            r#"{"note":{"rule":{"v6":false,"priority":1,"table":254,"unless_mark":null,"suppress":null}}}"#,
            r#"{"note":{"resolv-conf":{"interface":"../../x","server":"10.0.0.1"}}}"#,
            r#"{"note":{"firewall":{"table":"seikan-wg0"}}}"#,
            r#"{"run":"post-down"}"#,
            r#"{"run":"pre-up"}"#,
            r#"{"seal":{"names":true,"uapi":true}}"#,
            r#"{"exec":"id"}"#,
            r#"{"leave":{"path":"/etc/cron.d/x"}}"#,
            r#""end""#,
            "",
            "[",
        ];
        for text in forged {
            // What follows is not read.
            let bytes = [message(text), message(r#"{"leave":null}"#)].concat();
            let (answers, files) = answers(&[Request::Run(Moment::PreUp), SEALED], &bytes);
            assert_eq!(answers.len(), 3, "{text}: {answers:?}");
            assert!(
                answers[2].starts_with(r#"{"refused":"#),
                "{text}: {answers:?}"
            );
            assert_eq!(files, ["mark"], "{text}: everything is taken back");
        }
    }

    #[test]
    fn a_forged_journal_takes_nothing_back_that_is_not_the_tunnels() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("x");
        fs::write(&file, "1").expect("written");
        let sysctl = |path: &Path| Change::Sysctl {
            path: path.to_owned(),
            before: "0".to_owned(),
        };
        let left = vec![
            sysctl(&file),
            sysctl(Path::new("/proc/sys/net/ipv4/conf/all/forwarding")),
            Change::Firewall {
                table: "filter".to_owned(),
            },
        ];
        let mut warnings = Vec::new();
        take_back("wg0", left, &mut |warning| warnings.push(warning.message));
        assert_eq!(fs::read_to_string(&file).expect("read"), "1");
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("3 changes"), "{warnings:?}");
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_unread() {
        let (answers, _) = answers(&[SEALED], &u32::MAX.to_le_bytes());
        assert!(answers[1].starts_with(r#"{"refused":"#), "{answers:?}");
    }

    #[test]
    fn also_before_it_is_sealed_only_the_tunnels_own_changes_are_noted() {
        let sysctl = |path: &str| Change::Sysctl {
            path: path.into(),
            before: "0".to_owned(),
        };
        let firewall = |table: &str| Change::Firewall {
            table: table.to_owned(),
        };
        let config = config("");
        assert!(sysctl("/proc/sys/net/ipv4/conf/all/src_valid_mark").is_of(&config));
        assert!(firewall("seikan-wg0").is_of(&config));
        for change in [
            sysctl("/proc/sys/kernel/core_pattern"),
            sysctl("/proc/sys/net/../kernel/core_pattern"),
            sysctl("/proc/sys/net/ipv4/ip_forward"),
            sysctl("/etc/cron.d/x"),
            firewall("filter"),
            firewall("seikan-wg1"),
            Change::Dns {
                interface: "wg0".to_owned(),
            },
            Change::ResolvConf {
                interface: "wg0".to_owned(),
                server: [10, 0, 0, 1].into(),
            },
        ] {
            assert!(!change.is_of(&config), "{change:?}");
        }
    }
}
