//! Hosts of a page: each has its own network namespace, mounts, host name and processes, and one
//! shell that runs the page's blocks in order, like a terminal.

use super::page::{Directive, HostDefinition};
use crate::common::PATIENCE;
use crate::mesh::site::plug;
use seikan_sys::netlink::Netlink;
use seikan_sys::netns::NetNs;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Prepares a host's mounts, then runs the shell that reads blocks from standard input. `$0` is the
/// host's folder, `$1` the program, `$2` the project.
///
/// /etc, /var and /run are overlays on the machine's; /etc has the users of the packages. /root is
/// empty, and /usr/local/bin has the programs, an example of the library, a `sudo` that needs no
/// password and a `systemctl` that starts and stops the project's services.
const PREPARE: &str = r#"set -e
hostname "$(basename "$0")"
layer=$0/layer
mkdir -p "$layer"
mount -t tmpfs tmpfs "$layer"
for part in etc var run; do
    mkdir -p "$layer/$part" "$layer/work/$part"
done
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$layer/etc,workdir=$layer/work/etc" /etc
mount -t overlay overlay -o "lowerdir=/var,upperdir=$layer/var,workdir=$layer/work/var" /var
mount --bind "$layer/run" /run
cp "$0/hosts" /etc/hosts
printf 'nameserver 192.0.2.254\noptions timeout:1 attempts:1\n' > "$layer/resolv.conf"
[ ! -L /etc/resolv.conf ] || rm /etc/resolv.conf
cat "$layer/resolv.conf" > /etc/resolv.conf
printf 'hosts: files dns\n' > /etc/nsswitch.conf
: > "$0/bin/seikan"
mount --bind "$1" "$0/bin/seikan"
for program in "$1-lab" "${1%/*}/examples/fetch"; do
    [ -x "$program" ] || continue
    : > "$0/bin/${program##*/}"
    mount --bind "$program" "$0/bin/${program##*/}"
done
mount --rbind "$0/bin" /usr/local/bin
export SEIKAN_UNITS=$2/packaging/systemd
id=990
for user in $(sed -n 's/^u \([^ ]*\).*/\1/p' "$2/packaging/sysusers.d/seikan.conf"); do
    echo "$user:x:$id:$id::/:/usr/sbin/nologin" >> /etc/passwd
    echo "$user:x:$id:" >> /etc/group
    id=$((id + 1))
done
mkdir "$layer/home"
mount --bind "$layer/home" /root
export HOME=/root NO_COLOR=1 PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /root
exec bash -e"#;

/// Run when a shell ends, which it does before the end of the test only where something failed: the
/// state that explains why.
const REPORT: &str = r#"trap '(set +e; echo "--- $(hostname)"; seikan status; ip -s neigh; ip -s link; ss -tuna; tail -n 30 /run/unit-*.log) >&2 2>&1' EXIT
"#;

/// `sudo [-u USER] COMMAND`: the test is root already.
const SUDO: &str = r#"#!/bin/sh
if [ "$1" = -u ]; then
    user=$2; shift 2
    exec setpriv --reuid "$user" --regid "$user" --init-groups -- "$@"
fi
exec "$@"
"#;

/// `systemctl start|stop|restart|enable UNIT`: ExecStart= of the project's unit, with User= and
/// StateDirectory=.
const SYSTEMCTL: &str = r#"#!/bin/bash
verb=$1; shift
[ "$1" != --now ] || { shift; [ "$verb" != enable ] || verb=start; }
name=${1%.service} argument=
case $name in *@*) argument=${name#*@} name=${name%@*}@ ;; esac
line=$(sed -n 's/^ExecStart=//p' "$SEIKAN_UNITS/$name.service" | sed "s/%i/$argument/; s#/usr/bin/seikan#seikan#")
user=$(sed -n 's/^User=//p' "$SEIKAN_UNITS/$name.service")
if [ -n "$user" ]; then
    state=$(sed -n 's/^StateDirectory=//p' "$SEIKAN_UNITS/$name.service")
    install -d -m 700 -o "$user" -g "$user" "/var/lib/$state"
    line="setpriv --reuid $user --regid $user --init-groups -- $line"
fi
id=/run/unit-$1
case $verb in
start | restart)
    [ "$verb" = start ] || "$0" stop "$1"
    ($line > "$id.log" 2>&1 & echo $! > "$id")
    for _ in $(seq 300); do
        ! grep -qE 'listens|is up' "$id.log" || exit 0
        [ -d "/proc/$(cat "$id")" ] || break
        sleep 0.1
    done
    cat "$id.log"; exit 1 ;;
stop)
    [ ! -e "$id" ] || { kill "$(cat "$id")"; while [ -d "/proc/$(cat "$id")" ]; do sleep 0.1; done; rm "$id"; } ;;
esac
"#;

/// All hosts of a page and the switches that join them.
pub struct Network {
    hosts: BTreeMap<String, Host>,
    _switches: Netlink,
    _namespace: NetNs,
    _folder: tempfile::TempDir,
}

/// A host.
pub struct Host {
    folder: PathBuf,
    shell: Child,
    blocks: usize,
    printed: String,
    _namespace: NetNs,
}

impl Network {
    /// Sets up switches and hosts, or returns why the machine cannot.
    pub fn create(definitions: &[HostDefinition]) -> Result<Network, String> {
        let namespace = NetNs::create().map_err(|error| error.to_string())?;
        let switches = namespace.netlink().map_err(|error| error.to_string())?;
        let folder = tempfile::tempdir().expect("a folder");
        let names = host_names(definitions);
        // Switches send nothing of their own.
        let quiet = || fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
        namespace
            .run(quiet)
            .expect("namespace")
            .map_err(|error| error.to_string())?;
        let mut bridges = BTreeMap::new();
        let mut hosts = BTreeMap::new();
        for definition in definitions {
            let own = NetNs::create().map_err(|error| error.to_string())?;
            let netlink = own.netlink().expect("netlink");
            netlink
                .set_up(netlink.link("lo").expect("lo").index)
                .expect("up");
            for interface in &definition.interfaces {
                let number = bridges.len();
                let bridge = *bridges.entry(interface.switch.clone()).or_insert_with(|| {
                    let bridge = switches.create_bridge(&format!("switch{number}"));
                    let bridge = bridge.expect("a switch");
                    switches.set_up(bridge).expect("up");
                    bridge
                });
                let port = format!("p{}-{}", hosts.len(), interface.name);
                plug(&switches, bridge, &port, (&own, &interface.name));
                let index = netlink.link(&interface.name).expect("an interface").index;
                if let Some(mac) = interface.mac {
                    netlink
                        .set_hardware_address(index, mac)
                        .expect("a MAC address");
                }
                for address in &interface.addresses {
                    let address = address.parse().expect("an address");
                    netlink.add_address(index, address).expect("an address");
                }
                // Only the page's addresses: no link-local ones.
                let quiet = format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", interface.name);
                let quiet = own.run(|| fs::write(quiet, "1")).expect("namespace");
                quiet.map_err(|error| error.to_string())?;
                netlink.set_up(index).expect("up");
            }
            let folder = folder.path().join(&definition.name);
            let host = Host::start(own, folder, &names)?;
            hosts.insert(definition.name.clone(), host);
        }
        Ok(Network {
            hosts,
            _switches: switches,
            _namespace: namespace,
            _folder: folder,
        })
    }

    /// Returns a host by its name.
    pub fn host(&mut self, name: &str) -> &mut Host {
        let host = self.hosts.get_mut(name);
        host.unwrap_or_else(|| {
            panic!("no host {name}: add `<!-- host {name}: eth0 192.0.2.9/24 at internet -->`")
        })
    }

    /// Ends all shells, and returns what each printed then ([`REPORT`]).
    pub fn end(&mut self) -> String {
        self.hosts.values_mut().map(Host::end).collect()
    }
}

/// Returns the hosts file: hosts are found by name and below example.org, at their first address.
fn host_names(definitions: &[HostDefinition]) -> String {
    let mut names = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
    for host in definitions {
        let addresses = host
            .interfaces
            .iter()
            .flat_map(|interface| &interface.addresses);
        if let Some((address, _)) = addresses.filter_map(|a| a.split_once('/')).next() {
            names += &format!("{address} {0}.example.org {0}\n", host.name);
        }
    }
    names
}

impl Host {
    fn start(namespace: NetNs, folder: PathBuf, names: &str) -> Result<Host, String> {
        fs::create_dir_all(folder.join("bin")).expect("a folder");
        fs::write(folder.join("hosts"), names).expect("written");
        for (name, text) in [("sudo", SUDO), ("systemctl", SYSTEMCTL)] {
            let path = folder.join("bin").join(name);
            fs::write(&path, text).expect("written");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(&path, mode).expect("a mode");
        }
        let errors = fs::File::create(folder.join("errors")).expect("a file");
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "--uts",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ])
            .args(["bash", "-c", PREPARE])
            .arg(&folder)
            .arg(env!("CARGO_BIN_EXE_seikan"))
            .arg(super::project())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(errors);
        for name in [
            "PROTOCOL",
            "OFFLOAD",
            "METRICS",
            "MTU",
            "RUN_DIR",
            "STATE_DIR",
        ] {
            command.env_remove(format!("SEIKAN_{name}"));
        }
        let mut shell = namespace
            .spawn_command(&mut command)
            .map_err(|e| e.to_string())?;
        let input = shell.stdin.as_mut().expect("piped");
        let sent = input.write_all(REPORT.as_bytes());
        sent.map_err(|error| error.to_string())?;
        Ok(Host {
            folder,
            shell,
            blocks: 0,
            printed: String::new(),
            _namespace: namespace,
        })
    }

    /// Returns everything that this host has printed.
    pub fn printed(&self) -> &str {
        &self.printed
    }

    /// Runs a block and returns its output, or an error message.
    pub fn run(&mut self, script: &str, directive: &Directive) -> Result<String, String> {
        let mut result = self.run_once(script, directive);
        for _ in 1..directive.tries {
            if result.is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_secs(1));
            result = self.run_once(script, directive);
        }
        result
    }

    fn run_once(&mut self, script: &str, directive: &Directive) -> Result<String, String> {
        self.blocks += 1;
        let [block, output, status] = ["block", "output", "status"]
            .map(|name| self.folder.join(format!("{name}{}", self.blocks)));
        fs::write(&block, script).expect("written");
        let [b, o, s] = [&block, &output, &status].map(|path| path.display());
        // A failed command ends a subshell, or the shell itself. The status is written atomically.
        let done = format!("> {s}.new; mv {s}.new {s}");
        let line = if directive.until.is_some() {
            format!("(. {b}; echo 0 {done}) > {o} 2>&1 < /dev/null &\n")
        } else if directive.fails || directive.tries > 1 {
            format!("set +e; (set -e; . {b}) > {o} 2>&1 < /dev/null; echo $? {done}; set -e\n")
        } else {
            format!(". {b} > {o} 2>&1 < /dev/null; echo 0 {done}\n")
        };
        let input = self.shell.stdin.as_mut().expect("piped");
        let sent = input.write_all(line.as_bytes());
        sent.map_err(|error| self.problem(&error.to_string(), &output))?;
        let printed = || fs::read_to_string(&output).unwrap_or_default();
        let until = Instant::now() + PATIENCE;
        loop {
            match (&directive.until, fs::read_to_string(&status)) {
                (Some(word), _) if printed().contains(word.as_str()) => break,
                (Some(_), Ok(_)) => return Err(self.problem("it has ended", &output)),
                (None, Ok(status)) if (status == "0\n") != directive.fails => break,
                (None, Ok(status)) => {
                    return Err(self.problem(&format!("status {}", status.trim()), &output));
                }
                _ => {}
            }
            if self.shell.try_wait().expect("wait").is_some() {
                return Err(self.problem("a command failed", &output));
            }
            if Instant::now() > until {
                return Err(self.problem("it does not get that far", &output));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let printed = printed();
        self.printed += &printed;
        Ok(printed)
    }

    fn problem(&self, problem: &str, output: &Path) -> String {
        let output = fs::read_to_string(output).unwrap_or_default();
        format!("{problem}: {output}")
    }

    /// Ends the shell, and returns its errors. A command that does not end is not waited for.
    fn end(&mut self) -> String {
        drop(self.shell.stdin.take());
        let until = Instant::now() + Duration::from_secs(5);
        while self.shell.try_wait().expect("wait").is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        fs::read_to_string(self.folder.join("errors")).unwrap_or_default()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Killing the first process of the process namespace kills all others.
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
