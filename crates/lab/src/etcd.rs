//! A cluster of three real etcd members on this machine, which tests and the lab kill and restart.
//!
//! Each has ports and a folder of its own, and a shell that ends it when this program ends. Signals
//! to this program's process group, such as Ctrl-C, do not reach the shell; if the shell is killed,
//! the kernel kills the member.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use seikan_sys::netns::NetNs;
use serde_json::Value;
use tempfile::TempDir;

use crate::error::{LabError, Result, setup};

/// Members of a cluster: the minimum that survives the loss of one.
const MEMBERS: usize = 3;
/// Maximum time until the cluster has a leader.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two checks.
const PAUSE: Duration = Duration::from_millis(50);
/// Timeout of a member's response.
const ANSWER: Duration = Duration::from_secs(2);
/// Shell script that runs a program until standard input has a line or ends. If the shell is
/// killed, the program is killed with it.
const WATCHED: &str = r#"log=$1 folder=$2; shift 2
setpriv --pdeathsig KILL "$@" >"$log" 2>&1 </dev/null &
read -r told
kill -9 $! 2>/dev/null
wait
[ -n "$told" ] || rm -rf "$folder""#;

/// The members.
pub struct Cluster {
    members: Vec<Member>,
    folder: PathBuf,
    /// Token that keeps this cluster apart from others with the same addresses.
    token: String,
    /// Network namespace of the members; `None`: that of the calling thread.
    netns: Option<NetNs>,
}

struct Member {
    /// Port for clients.
    client: u16,
    /// Port for the other members.
    peer: u16,
    /// The shell that runs the member. It removes the files if this program ends without a message.
    running: Option<Child>,
}

impl Cluster {
    /// Whether etcd is installed.
    pub fn is_possible() -> bool {
        let version = Command::new("etcd").arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    }

    /// Starts all members on the loopback interface, in a namespace if one is given, and waits
    /// until they have a leader.
    ///
    /// # Errors
    /// [`LabError::Setup`] if there is no etcd, or it does not start.
    pub fn start(netns: Option<&NetNs>) -> Result<Cluster> {
        if !Cluster::is_possible() {
            let missing = "cannot find etcd; install it (Debian: etcd-server)";
            return Err(setup(missing));
        }
        let folder = TempDir::with_prefix("seikan-etcd-").map_err(failed)?.keep();
        let netns = netns.map(NetNs::try_clone).transpose().map_err(failed)?;
        let ports = within(netns.as_ref(), || free_ports(2 * MEMBERS))??;
        let mut ports = ports.into_iter();
        let mut port = || ports.next().unwrap_or_default();
        let members = (0..MEMBERS).map(|_| Member {
            client: port(),
            peer: port(),
            running: None,
        });
        let mut cluster = Cluster {
            members: members.collect(),
            token: folder.display().to_string(),
            folder,
            netns,
        };
        for number in 0..MEMBERS {
            cluster.run(number)?;
        }
        cluster.wait()?;
        Ok(cluster)
    }

    /// Returns the URLs of all members, whether or not they run.
    pub fn endpoints(&self) -> Vec<String> {
        let url = |member: &Member| format!("http://127.0.0.1:{}", member.client);
        self.members.iter().map(url).collect()
    }

    /// Returns the number of the leader, if there is one.
    pub fn leader(&self) -> Option<usize> {
        (0..MEMBERS).find(|number| {
            self.status(*number).is_some_and(|status| {
                let leader = status["leader"].as_str();
                leader.is_some() && leader == status["header"]["member_id"].as_str()
            })
        })
    }

    /// Kills a member (SIGKILL).
    pub fn kill(&mut self, number: usize) {
        if let Some(mut shell) = self.members[number].running.take() {
            if let Some(mut stdin) = shell.stdin.take() {
                // On an error the shell ends, because its input is closed.
                let _ = stdin.write_all(b"end\n");
            }
            let _ = shell.wait();
        }
    }

    /// Restarts the members that were killed.
    ///
    /// # Errors
    /// [`LabError::Setup`].
    pub fn revive(&mut self) -> Result<()> {
        for number in 0..MEMBERS {
            if self.members[number].running.is_none() {
                self.run(number)?;
            }
        }
        self.wait()
    }

    /// Writes the whole content of the cluster to a file (`etcdctl snapshot save`).
    ///
    /// # Errors
    /// [`LabError::Setup`], also if there is no etcdctl.
    pub fn snapshot(&self, file: &Path) -> Result<()> {
        let file = file.display().to_string();
        // A member saves its own state, which is complete once it has answered a linearizable
        // request.
        for words in [&["get", "anything"][..], &["snapshot", "save", &file]] {
            let mut ask = etcdctl();
            ask.args(["--endpoints", &self.endpoints()[0]]).args(words);
            let child = match &self.netns {
                Some(netns) => netns.spawn_command(&mut ask),
                None => ask.spawn(),
            };
            done(words[0], child.map_err(failed)?)?;
        }
        Ok(())
    }

    /// Kills all members, and starts them with the content of a file that [`Cluster::snapshot`]
    /// wrote. `is_new`: with another cluster id, as etcd's documentation requires.
    ///
    /// # Errors
    /// [`LabError::Setup`].
    pub fn restore(&mut self, file: &Path, is_new: bool) -> Result<()> {
        (0..MEMBERS).for_each(|number| self.kill(number));
        if is_new {
            self.token.push('+');
        }
        for number in 0..MEMBERS {
            let folder = self.folder.join(format!("m{number}"));
            fs::remove_dir_all(&folder).map_err(failed)?;
            let mut restore = etcdctl();
            restore.args(["snapshot", "restore"]).arg(file);
            restore.args(self.membership(number));
            done("snapshot restore", restore.spawn().map_err(failed)?)?;
        }
        self.revive()
    }

    /// Returns the options of a member's place in the cluster.
    fn membership(&self, number: usize) -> Vec<String> {
        let name = |number: usize| format!("m{number}");
        let peer = |member: &Member| format!("http://127.0.0.1:{}", member.peer);
        let all = self.members.iter().enumerate();
        let all: Vec<String> = all
            .map(|(number, member)| format!("{}={}", name(number), peer(member)))
            .collect();
        let folder = self.folder.join(name(number)).display().to_string();
        [
            ("--name", name(number)),
            ("--data-dir", folder),
            ("--initial-advertise-peer-urls", peer(&self.members[number])),
            ("--initial-cluster", all.join(",")),
            ("--initial-cluster-token", self.token.clone()),
        ]
        .into_iter()
        .flat_map(|(option, value)| [option.to_owned(), value])
        .collect()
    }

    fn run(&mut self, number: usize) -> Result<()> {
        let member = &self.members[number];
        let client = format!("http://127.0.0.1:{}", member.client);
        let log = self.folder.join(format!("m{number}.log"));
        let mut shell = Command::new("sh");
        shell
            .args(["-c", WATCHED, "sh"])
            .args([&log, &self.folder])
            .arg("etcd")
            .args(self.membership(number))
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .arg("--listen-peer-urls")
            .arg(format!("http://127.0.0.1:{}", member.peer))
            .stdin(Stdio::piped())
            .process_group(0);
        let shell = match &self.netns {
            Some(netns) => netns.spawn_command(&mut shell),
            None => shell.spawn(),
        };
        self.members[number].running = Some(shell.map_err(failed)?);
        Ok(())
    }

    /// Waits until all running members have a leader.
    fn wait(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let running = |number: &usize| self.members[*number].running.is_some();
        for number in (0..MEMBERS).filter(running) {
            let led = |status: Value| status["leader"].as_str().is_some_and(|l| l != "0");
            while !self.status(number).is_some_and(led) {
                if Instant::now() > deadline {
                    let log = self.folder.join(format!("m{number}.log"));
                    let log = fs::read_to_string(log).unwrap_or_default();
                    let last = log.lines().last().unwrap_or_default();
                    return Err(setup(format!("etcd has no leader: {last}")));
                }
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Returns the status of a member.
    fn status(&self, number: usize) -> Option<Value> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.members[number].client));
        within(self.netns.as_ref(), || status(address)).ok()?
    }
}

/// Returns the command etcdctl, of version 3.5 or earlier: later versions restore with another
/// program.
fn etcdctl() -> Command {
    let mut command = Command::new("etcdctl");
    command
        .env("ETCDCTL_API", "3")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

fn done(what: &str, child: Child) -> Result<()> {
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    Err(setup(format!("etcdctl {what}: {last}")))
}

fn status(address: SocketAddr) -> Option<Value> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER).ok()?;
    stream.set_read_timeout(Some(ANSWER)).ok()?;
    let request = "POST /v3/maintenance/status HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}";
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for number in 0..self.members.len() {
            self.kill(number);
        }
        // On an error /tmp is cleared eventually.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns free ports of the loopback interface, none of which a client is assigned meanwhile
/// (`ip_local_port_range` begins at 32,768).
fn free_ports(count: usize) -> Result<Vec<u16>> {
    const PORTS: std::ops::Range<u16> = 10_000..32_000;
    // Clusters of other processes begin at other ports.
    let first = std::process::id() as usize * 64 % PORTS.len();
    let all = PORTS.skip(first).chain(PORTS.take(first));
    let free = all.filter(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    let free: Vec<u16> = free.take(count).collect();
    if free.len() < count {
        let missing = std::io::Error::other("no ports are free");
        return Err(failed(missing));
    }
    Ok(free)
}

fn within<T: Send>(netns: Option<&NetNs>, work: impl FnOnce() -> T + Send) -> Result<T> {
    match netns {
        Some(netns) => netns
            .run(work)
            .map_err(|e| setup(format!("cannot run a cluster of etcd: {e}"))),
        None => Ok(work()),
    }
}

fn failed(error: std::io::Error) -> LabError {
    setup(format!("cannot run a cluster of etcd: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::{Pid, getpgid, getpgrp};

    #[test]
    fn a_member_ends_with_its_shell_which_signals_to_our_group_do_not_reach() {
        if !Cluster::is_possible() {
            let all = std::env::var_os("SEIKAN_REQUIRE_ALL").is_some();
            assert!(!all, "there is no etcd: make deps");
            return eprintln!("SKIPPED: there is no etcd (Debian: etcd-server)");
        }
        let mut cluster = Cluster::start(None).expect("a cluster");
        assert!(cluster.status(0).is_some());
        let shell = cluster.members[0].running.as_mut().expect("a shell");
        let group = getpgid(Some(Pid::from_raw(shell.id() as i32)));
        assert_ne!(group, Ok(getpgrp()));
        shell.kill().expect("killed");
        shell.wait().expect("ended");
        let until = Instant::now() + PATIENCE;
        while cluster.status(0).is_some() {
            assert!(Instant::now() < until, "the member goes on");
            std::thread::sleep(PAUSE);
        }
    }
}
