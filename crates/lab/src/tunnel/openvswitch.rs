//! Open vSwitch with its datapath in user space: a bridge between host A and host B, in a host of
//! its own.
//!
//! Database, switch and their sockets are private: nothing of a switch of this machine is touched.

use std::path::Path;
use std::process::Command;

use seikan_ui::Interrupt;

use crate::error::{Doing, Result, setup};
use crate::process::{Process, wait_for};
use crate::program::{need, need_tun, of_tunnel};
use crate::site::{Host, Hosts, Link, LinkKind, PORTS, output};
use crate::tunnel::{READY_PATIENCE, SWITCH, Started, Tunnel};

/// The switch, as Debian's package openvswitch-switch has it.
pub(super) struct OpenVSwitch;

/// Path of the package's database schema.
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
/// Programs of the package.
const PROGRAMS: [&str; 5] = [
    "ovs-vswitchd",
    "ovsdb-tool",
    "ovsdb-server",
    "ovs-vsctl",
    "ovs-ofctl",
];
/// Sockets of the database and of the switch, in the tunnel's directory.
const DATABASE: &str = "database.sock";
const CONTROL: &str = "switch.ctl";

impl Tunnel for OpenVSwitch {
    fn name(&self) -> &str {
        "openvswitch"
    }

    fn by_default(&self) -> bool {
        false
    }

    fn programs(&self) -> &[&str] {
        &PROGRAMS
    }

    fn availability(&self) -> Result<()> {
        need_tun()?;
        need(&PROGRAMS)
            .map_err(|why| setup(format!("{why}: Debian's package openvswitch-switch has it")))?;
        if Path::new(SCHEMA).exists() {
            return Ok(());
        }
        Err(setup(format!(
            "no {SCHEMA}: Debian's package openvswitch-common has it"
        )))
    }

    /// The switch takes packets as they are. It would drop packets that are longer than the MTU,
    /// and packets without a checksum.
    fn link(&self, asked: Link) -> Link {
        Link {
            kind: LinkKind::Middle,
            ..asked.offload(false)
        }
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        start_in(hosts.middle()?, &PORTS, dir, interrupt)
    }

    fn crossed(&self) -> Option<&str> {
        Some(PORTS[0])
    }
}

/// Starts database and switch in `host`, with these interfaces of it as ports. Files go to `dir`.
pub(crate) fn start_in(
    host: &Host,
    ports: &[&str],
    dir: &Path,
    interrupt: &Interrupt,
) -> Result<Started> {
    let (database, control) = (dir.join(DATABASE), dir.join(CONTROL));
    let at = |path: &Path| path.display().to_string();
    let file = at(&dir.join("switch.db"));
    run("ovsdb-tool", &["create", &file, SCHEMA], dir)?;

    let mut started = Started::default();
    let mut start = |name: &str, arguments: &[String], socket: &Path| {
        let mut command = command(name, dir)?;
        command.args(arguments);
        let mut process = Process::start(host, name, command, dir)?;
        let event = format!("the socket {}", socket.display());
        let come = wait_for(&event, READY_PATIENCE, interrupt, || {
            process.check_alive()?;
            Ok(socket.exists().then_some(()))
        });
        started.processes.push(process);
        come
    };
    let remote = format!("--remote=punix:{}", at(&database));
    let own = format!("--unixctl={}", at(&dir.join("database.ctl")));
    start("ovsdb-server", &[file, remote, own], &database)?;
    run_vsctl(dir, &["--no-wait", "init"])?;
    let from = format!("unix:{}", at(&database));
    let own = format!("--unixctl={}", at(&control));
    start("ovs-vswitchd", &[from, own], &control)?;

    let mut words = vec![
        "add-br",
        SWITCH,
        "--",
        "set",
        "bridge",
        SWITCH,
        "datapath_type=netdev",
    ];
    for port in ports {
        words.extend(["--", "add-port", SWITCH, port]);
    }
    run_vsctl(dir, &words)?;
    started.orders = Some(dir.to_owned());
    Ok(started)
}

/// Disables the flow cache of the switch in `dir`, so that every packet takes the slow path through
/// `tables` tables of rules (1 to 254); `None` reverts that.
pub(crate) fn forget_flows(dir: &Path, tables: Option<u32>) -> Result<()> {
    const FLOW_LIMIT: &str = "other_config:flow-limit=0";
    let file = dir.join("rules");
    std::fs::write(&file, rules(tables.unwrap_or(1))).doing("write rules")?;
    let file = file.display().to_string();
    let at = format!("unix:{}", dir.join(format!("{SWITCH}.mgmt")).display());
    run("ovs-ofctl", &["-O", "OpenFlow13", "del-flows", &at], dir)?;
    run(
        "ovs-ofctl",
        &["-O", "OpenFlow13", "add-flows", &at, &file],
        dir,
    )?;
    match tables {
        Some(_) => run_vsctl(dir, &["set", "Open_vSwitch", ".", FLOW_LIMIT]),
        None => run_vsctl(
            dir,
            &["remove", "Open_vSwitch", ".", "other_config", "flow-limit"],
        ),
    }
}

/// Returns a chain of tables, the last of which switches as by default.
fn rules(tables: u32) -> String {
    let goto = (1..tables).map(|next| format!("table={},actions=goto_table:{next}\n", next - 1));
    goto.chain([format!("table={},actions=NORMAL\n", tables - 1)])
        .collect()
}

fn run_vsctl(dir: &Path, words: &[&str]) -> Result<()> {
    let database = format!("--db=unix:{}", dir.join(DATABASE).display());
    let mut arguments = vec![&*database, "--timeout=10"];
    arguments.extend(words);
    run("ovs-vsctl", &arguments, dir)
}

/// Returns the command of a program of Open vSwitch that writes all its files into `dir`.
fn command(name: &str, dir: &Path) -> Result<Command> {
    let mut command = Command::new(of_tunnel(name)?);
    for variable in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR"] {
        command.env(variable, dir);
    }
    Ok(command)
}

fn run(name: &str, arguments: &[&str], dir: &Path) -> Result<()> {
    output(None, command(name, dir)?.args(arguments), "").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_lead_to_the_last_one() {
        assert_eq!(rules(1), "table=0,actions=NORMAL\n");
        assert_eq!(
            rules(3),
            "table=0,actions=goto_table:1\ntable=1,actions=goto_table:2\ntable=2,actions=NORMAL\n"
        );
    }
}
