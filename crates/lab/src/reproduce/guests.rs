//! Guests of a virtual switch, each a network namespace on a port of it, and one host behind it to
//! which they send.

use std::fmt;
use std::time::Duration;

use seikan_load::{Ends, LiveOptions, Meter};
use seikan_ui::Interrupt;
use tempfile::TempDir;

use super::Bench;
use crate::cleanup::private_directory;
use crate::error::{Result, setup};
use crate::load::live;
use crate::scenario::Hog;
use crate::site::{Host, join};
use crate::tunnel::{SWITCH, Started, openvswitch};

/// The guests, and the ports of the switch, the last of which leads to the receiver.
pub(super) const GUESTS: [&str; 8] = ["G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8"];
const PORTS: [&str; 9] = [
    "port1", "port2", "port3", "port4", "port5", "port6", "port7", "port8", UPLINK,
];
pub(super) const UPLINK: &str = "uplink";
/// Time for streams to find their rate.
const WARMUP: Duration = Duration::from_secs(1);

/// Implementation of the switch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Switch {
    Bridge,
    OpenVSwitch,
}

impl Switch {
    /// Returns the name for use in a file name.
    pub(super) fn slug(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::OpenVSwitch => "openvswitch",
        }
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bridge => "bridge",
            Self::OpenVSwitch => "Open vSwitch",
        })
    }
}

/// Guests, switch and receiver. Fields drop in this order: programs, hosts, directory.
pub(super) struct Network {
    _started: Started,
    pub(super) guests: Vec<Host>,
    receiver: Host,
    pub(super) switch: Host,
    _dir: TempDir,
}

impl Network {
    /// Creates the network. `rate` is the rate of the receiver's NIC in bit/s; `None`: limited only
    /// by the processors.
    pub(super) fn create(kind: Switch, rate: Option<u64>, bench: &Bench<'_>) -> Result<Self> {
        let switch = Host::create("S", 3)?;
        let receiver = Host::create("B", 2)?;
        let guests = GUESTS.iter().zip(11..);
        let guests: Vec<Host> = guests
            .map(|(name, number)| Host::create(name, number))
            .collect::<Result<_>>()?;
        // Open vSwitch does not segment packets, and would drop packets longer than the MTU.
        let link = bench.link(None).offload(kind == Switch::Bridge);
        for (port, host) in PORTS.iter().zip(guests.iter().chain([&receiver])) {
            let addresses = host.addresses();
            let nic = host.nic(&host.device, &addresses);
            join([switch.nic(port, &[]), nic], &link)?;
        }
        if let Some(rate) = rate {
            switch.limit(UPLINK, rate)?;
        }
        let dir = private_directory()?;
        let started = match kind {
            Switch::Bridge => {
                switch.bridge(SWITCH, &PORTS)?;
                Started::default()
            }
            Switch::OpenVSwitch => {
                openvswitch::start_in(&switch, &PORTS, dir.path(), bench.interrupt)?
            }
        };
        Ok(Self {
            _started: started,
            guests,
            receiver,
            switch,
            _dir: dir,
        })
    }

    /// Makes `count` guests send during `work`, which can read the number of bytes received from
    /// each so far.
    pub(super) fn sending<T>(
        &self,
        senders: usize,
        bench: &Bench<'_>,
        work: impl FnOnce(&dyn Fn() -> Vec<u64>) -> Result<T>,
    ) -> Result<T> {
        let guests = self.guests.iter().take(senders);
        let ends: Vec<Ends<'_>> = guests
            .map(|guest| guest.to(&self.receiver, self.receiver.address))
            .collect();
        let (mut work, mut outcome) = (Some(work), None);
        nested(&ends, &[], bench.interrupt, &mut |meters| {
            bench.interrupt.sleep(WARMUP)?;
            let arrived = || meters.iter().map(|meter| meter.bytes()).collect();
            outcome = work.take().map(|work| work(&arrived));
            Ok(())
        })?;
        let none = || {
            Err(setup(
                "the measurement between guests did not run: this is a bug",
            ))
        };
        outcome.unwrap_or_else(none)
    }

    /// Starts processes that spin in guests, in the last guests first.
    pub(super) fn spinning(&self, hogs: usize) -> Result<Vec<Hog>> {
        self.guests
            .iter()
            .rev()
            .take(hogs)
            .map(Hog::start)
            .collect()
    }
}

/// Runs one load within the other, and within the last one `work`, which gets the meters of all.
fn nested(
    ends: &[Ends<'_>],
    meters: &[&Meter],
    interrupt: &Interrupt,
    work: &mut dyn FnMut(&[&Meter]) -> Result<()>,
) -> Result<()> {
    let Some((first, rest)) = ends.split_first() else {
        return work(meters);
    };
    live(first, &LiveOptions::default(), interrupt, |meter| {
        let mut all = meters.to_vec();
        all.push(meter);
        nested(rest, &all, interrupt, work)
    })
}
