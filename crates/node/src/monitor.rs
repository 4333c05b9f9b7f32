//! The monitor: the process of a tunnel that stays privileged while the daemon handles network traffic.
//!
//! It is forked before anything is set up ([`Monitor::start`]). It runs the configuration's hooks, keeps the
//! journal of changes to the system ([`crate::journal`]), and undoes them when the daemon ends, in whatever
//! way.
//!
//! During set-up the daemon is as privileged as the monitor, and reports its changes. [`Monitor::seal`] ends
//! that phase: from then on the daemon is assumed to be compromised. The monitor then accepts three requests:
//! [`Request::Reload`], and once each [`Request::Leave`] with the state that `SaveConfig` writes and the sessions, and
//! [`Request::End`]. None contains a path, a command, an interface or a sysctl; these come from the configuration that
//! the monitor was forked with. After any other message it undoes everything and ends. It also works on its own: it
//! keeps the mesh's name server in resolv.conf, and sets up forwarding again when a gateway's interface is recreated.
//!
//! A message is its length (four bytes, little endian, at most [`MAX_MESSAGE`]), followed by JSON of that
//! length.

use crate::control::socket::Lock;
use crate::control::{ControlError, RuntimeDirs};
use crate::former::FormerSessions;
use crate::journal::change::Change;
use crate::journal::{Journal, JournalError, Notes};
use crate::options::UpOptions;
use crate::save::{self, Running};
use crate::setup::forwarding::Upkeep;
use crate::setup::hooks::{self, Failure, HookError, Moment};
use crate::setup::{Recorder, names};
use seikan_config::{Config, Diagnostic, Diagnostics, GatewayMode, Severity};
use seikan_sys::monitor as process;
use seikan_sys::netlink::{Event, Group, Netlink, Subscription};
use seikan_sys::poll::{Epoll, Interest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Longest message, in bytes: the state of some 50,000 peers.
pub const MAX_MESSAGE: u32 = 16 << 20;
/// Interval between two checks of resolv.conf.
const KEEP_EVERY: Duration = Duration::from_secs(5);
/// Maximum time of a reload. It asks the daemon, and resolves names, which takes minutes without a name server.
const RELOAD_PATIENCE: Duration = Duration::from_secs(180);

const TOKEN_DAEMON: u64 = 0;
const TOKEN_INTERFACE: u64 = 1;
const TOKEN_RELOAD: u64 = 2;

/// Request of the daemon.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Record a change that is about to be made. Not after [`Request::Seal`].
    Note(Change),
    /// Run a hook of the start. Not after [`Request::Seal`].
    Run(Moment),
    /// The tunnel is set up: accept only [`Request::Reload`], [`Request::Leave`] and [`Request::End`] from now on.
    Seal(Sealed),
    /// Apply the changed file of the configuration. The reply does not wait for that.
    Reload,
    /// Run the hooks before the end, note the sessions, and save the state if the configuration says `SaveConfig`.
    Leave(Leaving),
    /// Undo everything, and run the hooks after the end.
    End,
}

/// State of a tunnel that ends.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leaving {
    /// The state that `SaveConfig` writes.
    pub running: Option<Box<Running>>,
    /// The sessions, for the next start.
    pub former: FormerSessions,
}

/// Result of the set-up.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sealed {
    /// Members of the mesh are found by name.
    pub names: bool,
    /// There is a socket for `wg`.
    pub uapi: bool,
}

/// Reply of the monitor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// Done.
    Done,
    /// Refused: the daemon may not request it.
    Refused(String),
    /// A hook failed.
    Hook(Failure),
    /// Done, except for these failures.
    Failures(Vec<String>),
}

/// Why the monitor did not fulfil a request.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// It could not be started.
    #[error("cannot start the monitor, which keeps the tunnel's privileges: {0}")]
    Start(io::Error),
    /// It has ended.
    #[error(
        "the monitor, which keeps the tunnel's privileges, has ended: {0}; run `seikan down` to clean up"
    )]
    Gone(io::Error),
    /// It refused the request.
    #[error("the monitor refuses: {0}")]
    Refused(String),
    /// A hook failed.
    #[error(transparent)]
    Hook(#[from] HookError),
}

/// The daemon's handle of the monitor.
#[derive(Debug)]
pub struct Monitor {
    process: process::Monitor,
}

impl Monitor {
    /// Forks the monitor, which takes over the journal.
    ///
    /// # Errors
    /// [`MonitorError::Start`].
    pub fn start(
        config: &Config,
        options: &UpOptions,
        journal: Journal,
    ) -> Result<Monitor, MonitorError> {
        let file = journal.file();
        let mut journal = Some(journal);
        let process = process::Monitor::start(file.as_slice(), |socket| {
            if let Some(journal) = journal.take() {
                Keeper::new(config, options, journal).serve(&socket);
            }
        });
        if let Some(journal) = journal.take() {
            journal.leave_to_the_other();
        }
        let process = process.map_err(MonitorError::Start)?;
        Ok(Monitor { process })
    }

    /// Returns the stream to the monitor. It sends only replies, so an unexpected readable stream means that it
    /// has ended.
    pub fn socket(&self) -> &UnixStream {
        self.process.socket()
    }

    fn ask(&self, request: &Request) -> Result<Reply, MonitorError> {
        let asked = send(self.socket(), request).and_then(|()| receive(self.socket()));
        match asked.map_err(MonitorError::Gone)? {
            Some(Reply::Refused(reason)) => Err(MonitorError::Refused(reason)),
            Some(reply) => Ok(reply),
            None => Err(MonitorError::Gone(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Runs a hook of the start.
    ///
    /// # Errors
    /// [`MonitorError::Hook`], or the monitor has ended.
    pub fn run(&mut self, moment: Moment) -> Result<(), MonitorError> {
        match self.ask(&Request::Run(moment))? {
            Reply::Hook(failure) => Err(failure.of(moment).into()),
            _ => Ok(()),
        }
    }

    /// From now on the monitor accepts only [`Self::reload`], [`Self::leave`] and [`Self::end`].
    ///
    /// # Errors
    /// The monitor has ended.
    pub fn seal(&mut self, sealed: Sealed) -> Result<(), MonitorError> {
        self.ask(&Request::Seal(sealed)).map(drop)
    }

    /// Begins to apply the changed file of the configuration. Returns the failures to begin, as texts for the user.
    pub fn reload(&self) -> Vec<String> {
        self.failures(&Request::Reload)
    }

    /// Runs the hooks before the end, and saves the state. Returns the failures, as texts for the user.
    pub fn leave(&mut self, leaving: Leaving) -> Vec<String> {
        self.failures(&Request::Leave(leaving))
    }

    /// Undoes everything and runs the hooks after the end. Returns the failures, as texts for the user.
    pub fn end(&mut self) -> Vec<String> {
        self.failures(&Request::End)
    }

    fn failures(&self, request: &Request) -> Vec<String> {
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

/// The monitor in its own process.
struct Keeper<'a> {
    config: &'a Config,
    options: &'a UpOptions,
    journal: Journal,
    reload: Reload,
    /// The last hook of the start that was run.
    reached: Option<Moment>,
    sealed: Option<Sealed>,
    has_left: bool,
    has_ended: bool,
}

impl<'a> Keeper<'a> {
    fn new(config: &'a Config, options: &'a UpOptions, journal: Journal) -> Keeper<'a> {
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
    fn serve(mut self, socket: &UnixStream) {
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
        // Set before they run: the hooks of the end undo the effects of those that fail half way.
        self.reached = Some(moment);
        match hooks::run(self.config, moment) {
            Ok(()) => Reply::Done,
            Err(error) => Reply::Hook(error.into()),
        }
    }

    fn leave(&mut self, leaving: &Leaving) -> Vec<String> {
        self.has_left = true;
        // A reload would change the tunnel that ends.
        self.reload = Reload::default();
        // Without the note, peers notice the restart by themselves.
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

/// The program that applies a changed configuration ([`UpOptions::reload`]), at most one at a time. A drop kills it.
#[derive(Default)]
struct Reload {
    running: Option<Child>,
    /// The running program is killed then: a daemon that does not end its answers must not prevent later reloads.
    late_at: Option<Instant>,
    /// The file may have changed after the running program read it.
    again: bool,
}

impl Reload {
    /// Starts the program, or has it started again when it ends.
    fn begin(&mut self, options: &UpOptions, epoll: &Epoll) -> Result<(), String> {
        if self.running.is_some() {
            self.again = true;
            return Ok(());
        }
        let [program, arguments @ ..] = options.reload.as_slice() else {
            return Err("cannot reload: this tunnel was not started from a file".to_owned());
        };
        // The program does not read the pipe: it is there because its other end fails when the program ends.
        let mut command = Command::new(program);
        let child = command.args(arguments).stdin(Stdio::piped()).spawn();
        let failed = |error: io::Error| format!("cannot reload: {}: {error}", program.display());
        let mut child = child.map_err(failed)?;
        let pipe = child.stdin.as_ref();
        if let Some(Err(error)) = pipe.map(|pipe| epoll.add(pipe, TOKEN_RELOAD, Interest::Read)) {
            end(&mut child);
            return Err(failed(error));
        }
        self.running = Some(child);
        self.late_at = Some(Instant::now() + RELOAD_PATIENCE);
        Ok(())
    }

    /// Kills the program if it takes too long; its end is an event as usual. Returns the time until then, if any.
    fn end_if_late(&mut self, now: Instant) -> Option<Duration> {
        let left = self.late_at?.saturating_duration_since(now);
        if !left.is_zero() {
            return Some(left);
        }
        self.late_at = None;
        let _ = self.running.as_mut()?.kill();
        let message = format!(
            "cannot reload: it was ended after {} s",
            RELOAD_PATIENCE.as_secs()
        );
        warn(Diagnostic::new(Severity::Warning, "reload", message));
        None
    }

    /// Takes the exit status of the program, which has printed its errors.
    fn has_ended(&mut self, options: &UpOptions, epoll: &Epoll) {
        self.late_at = None;
        if let Some(mut child) = self.running.take() {
            let _ = child.wait();
        }
        if std::mem::take(&mut self.again)
            && let Err(error) = self.begin(options, epoll)
        {
            warn(Diagnostic::new(Severity::Warning, "reload", error));
        }
    }
}

impl Drop for Reload {
    fn drop(&mut self) {
        if let Some(child) = &mut self.running {
            end(child);
        }
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
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

/// Prints a warning like those of the daemon.
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

/// Receives a message; `None` if it is invalid.
fn receive<T: DeserializeOwned>(mut socket: &UnixStream) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE {
        return Ok(None);
    }
    // Allocates only as many bytes as arrive.
    let mut bytes = Zeroizing::new(Vec::new());
    let read = socket.take(length.into()).read_to_end(&mut bytes)?;
    if read < length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&bytes).ok())
}

/// Undoes the changes of an instance that was killed, and removes its sockets; returns `false` if there are
/// none. Hooks are not run. `warn` gets the failures.
///
/// # Errors
/// Another process is cleaning up, or the name is in use.
pub fn clean_up(
    dirs: &RuntimeDirs,
    name: &str,
    warn: &mut dyn FnMut(Diagnostic),
) -> Result<bool, CleanUpError> {
    if !crate::journal::is_left(&dirs.run, name) {
        return Ok(false);
    }
    let _lock = Lock::take(dirs, name)?;
    let (journal, left) = Journal::open(&dirs.run, name)?;
    take_back(name, left, warn);
    drop(journal);
    let _ = fs::remove_file(dirs.control(name));
    // If another program owned the socket, it would answer.
    let uapi = dirs.uapi(name);
    if UnixStream::connect(&uapi).is_err() {
        let _ = fs::remove_file(uapi);
    }
    Ok(true)
}

/// Why a clean-up failed.
#[derive(Debug, thiserror::Error)]
pub enum CleanUpError {
    /// The name is in use.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The journal is in use.
    #[error(transparent)]
    State(#[from] JournalError),
}

/// Undoes the changes of an earlier instance, with a warning. Changes that a tunnel of this name never makes
/// are skipped, whoever wrote them into the journal.
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
    for failure in crate::journal::take_back(left) {
        warn(Diagnostic::new(Severity::Warning, name, failure));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_config::{Overrides, Source, Syntax, parse};
    use std::ffi::OsString;
    use std::net::Shutdown;
    use std::path::Path;

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

    /// Replies of the monitor to these requests and bytes, and the contents of the directory afterwards.
    fn answers(requests: &[Request], bytes: &[u8]) -> (Vec<String>, Vec<String>) {
        let folder = tempfile::tempdir().expect("folder");
        let mark = folder.path().join("mark");
        let config = config(&format!("PostDown = touch {}", mark.display()));
        let dirs = RuntimeDirs {
            run: folder.path().to_owned(),
            wireguard: folder.path().join("wireguard"),
            state: folder.path().join("state"),
        };
        let (journal, _) = Journal::open(&dirs.run, "wg0").expect("journal");
        let options = UpOptions {
            dirs,
            ..UpOptions::default()
        };
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let answers = std::thread::scope(|scope| {
            let (config, options) = (&config, &options);
            scope.spawn(move || Keeper::new(config, options, journal).serve(&theirs));
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
            // The messages after it are not read.
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
    fn requests_during_a_reload_lead_to_one_more() {
        let folder = tempfile::tempdir().expect("folder");
        let [mark, go_on] = ["mark", "go-on"].map(|name| folder.path().join(name));
        // Both runs wait until all requests are made.
        let script = format!(
            "echo >> {}; until [ -e {} ]; do sleep 0.01; done",
            mark.display(),
            go_on.display()
        );
        let options = UpOptions {
            reload: ["sh", "-c", &script].map(OsString::from).to_vec(),
            ..UpOptions::default()
        };
        let mut epoll = Epoll::new(1).expect("epoll");
        let mut reload = Reload::default();
        for _ in 0..5 {
            reload.begin(&options, &epoll).expect("begun");
        }
        fs::write(&go_on, "").expect("written");
        while reload.running.is_some() {
            assert_eq!(epoll.wait(None).expect("waited").len(), 1);
            reload.has_ended(&options, &epoll);
        }
        assert_eq!(fs::read_to_string(&mark).expect("read"), "\n\n");
    }

    #[test]
    fn a_reload_that_does_not_end_is_killed_and_the_next_one_runs() {
        let folder = tempfile::tempdir().expect("folder");
        let mark = folder.path().join("mark");
        // The first run does not end.
        let script = format!("[ -e {0} ] || {{ > {0}; exec sleep 600; }}", mark.display());
        let options = UpOptions {
            reload: ["sh", "-c", &script].map(OsString::from).to_vec(),
            ..UpOptions::default()
        };
        let mut epoll = Epoll::new(1).expect("epoll");
        let mut reload = Reload::default();
        let now = Instant::now();
        assert_eq!(reload.end_if_late(now), None);
        for _ in 0..2 {
            reload.begin(&options, &epoll).expect("begun");
        }
        while !mark.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(reload.end_if_late(now).is_some());
        assert_eq!(reload.end_if_late(now + 10 * RELOAD_PATIENCE), None);
        for _ in 0..2 {
            assert_eq!(epoll.wait(None).expect("waited").len(), 1);
            reload.has_ended(&options, &epoll);
        }
        assert!(reload.running.is_none());
    }

    #[test]
    fn a_reload_ends_before_the_tunnel_is_taken_back() {
        let folder = tempfile::tempdir().expect("folder");
        let (gone, mark) = (folder.path().join("gone"), folder.path().join("mark"));
        let config = config(&format!(
            "PostDown = kill -0 $(cat {}) || touch {}",
            mark.display(),
            gone.display()
        ));
        let dirs = RuntimeDirs {
            run: folder.path().to_owned(),
            wireguard: folder.path().join("wireguard"),
            state: folder.path().join("state"),
        };
        let (journal, _) = Journal::open(&dirs.run, "wg0").expect("journal");
        let script = format!(
            "echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600",
            mark.display()
        );
        let options = UpOptions {
            dirs,
            reload: ["sh", "-c", &script].map(OsString::from).to_vec(),
            ..UpOptions::default()
        };
        let epoll = Epoll::new(1).expect("epoll");
        let mut keeper = Keeper::new(&config, &options, journal);
        keeper.reached = Some(Moment::PostUp);
        keeper.reload.begin(&options, &epoll).expect("begun");
        while !mark.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        keeper.leave(&Leaving::default());
        keeper.end();
        assert!(gone.exists());
    }

    #[test]
    fn a_reload_needs_a_file_and_a_tunnel_that_is_set_up() {
        let (replies, _) = answers(&[SEALED, Request::Reload], &[]);
        assert!(
            replies[1].starts_with(r#"{"failures":["cannot reload"#),
            "{replies:?}"
        );
        let (replies, _) = answers(&[Request::Reload], &[]);
        assert!(replies[0].starts_with(r#"{"refused":"#), "{replies:?}");
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
