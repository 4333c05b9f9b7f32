//! Loss repair during a measurement, as the daemon of the tunnel counts it.
//!
//! Connections in a repaired tunnel hardly show the losses of its path. So the daemon is asked
//! before and after the measurement, if the tunnel is one of Seikan's with the native protocol and
//! its control socket is accessible.

use seikan_diagnose::Cause;
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::status::{PeerStatus, Repair, RepairState, Status};
use seikan_observe::path::PathMap;
use serde::Serialize;

use super::text::{Page, paragraph};
use crate::screen::{BOLD, RESET, printable, rounded};

/// Minimum number of packets to a peer during the measurement. Peers with fewer packets are not
/// reported.
const LEAST_PACKETS: u64 = 100;

/// Loss repair of the path to one peer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LossRepair {
    /// Name of the peer, or its key.
    pub peer: String,
    /// Whether parity is sent, and if not, why; `None` if it is off at either end.
    pub state: Option<RepairState>,
    /// Share of the records to the peer that is lost at random, 0 to 1.
    pub loss: f64,
    /// Lost records that the peer restored during the measurement.
    pub restored: u64,
    /// Lost records that it could not restore.
    pub not_restored: u64,
}

/// The tunnel at the beginning of a measurement.
pub struct Watch {
    before: Status,
}

impl Watch {
    /// Returns `None` if no daemon of Seikan's answers for this path.
    pub fn start(map: &PathMap) -> Option<Watch> {
        let pid = map.program.as_ref()?.pid;
        let before = status(map.inner.as_deref()?)?;
        (before.pid == pid && before.interface.protocol == "native").then_some(Watch { before })
    }

    /// Returns the peers about which there is something to say since the start or the last answer;
    /// `None` without an answer.
    pub fn next(&mut self) -> Option<Vec<LossRepair>> {
        let after = status(&self.before.interface.name)?;
        let before = std::mem::replace(&mut self.before, after);
        if before.pid == self.before.pid {
            Some(between(&before, &self.before))
        } else {
            Some(Vec::new())
        }
    }
}

fn status(interface: &str) -> Option<Status> {
    ask::status(&RuntimeDirs::for_client(Some(interface)), interface).ok()
}

fn between(before: &Status, after: &Status) -> Vec<LossRepair> {
    let of = |peer: &PeerStatus| {
        let same = |other: &&PeerStatus| other.public_key == peer.public_key;
        let then = before.peers.iter().find(same);
        let then = then.and_then(|peer| peer.path.repair.as_ref());
        let now = peer.path.repair.as_ref();
        let grown = |count: fn(&Repair) -> u64| {
            let now = now.map_or(0, count);
            now.saturating_sub(then.map_or(0, count))
        };
        LossRepair {
            peer: peer.name.clone().unwrap_or_else(|| peer.public_key.clone()),
            state: now.map(|repair| repair.state),
            loss: now.map_or(0.0, |repair| repair.loss),
            restored: grown(|repair| repair.restored),
            not_restored: grown(|repair| repair.not_restored),
        }
    };
    // Other peers have nothing to do with the measured traffic.
    let carried = |peer: &&PeerStatus| {
        let same = |other: &&PeerStatus| other.public_key == peer.public_key;
        let sent = |peer: &PeerStatus| peer.traffic.outbound.packets_out;
        let then = before.peers.iter().find(same).map_or(0, sent);
        sent(peer).saturating_sub(then) >= LEAST_PACKETS
    };
    let peers = after.peers.iter().filter(carried).map(of);
    let is_quiet = |repair: &LossRepair| {
        let idle = matches!(
            repair.state,
            Some(RepairState::Starting | RepairState::NotNeeded)
        );
        idle && repair.restored + repair.not_restored == 0
    };
    peers.filter(|repair| !is_quiet(repair)).collect()
}

/// Returns a sentence for each peer. `cause` is the diagnosed cause.
pub fn render(repairs: &[LossRepair], cause: Cause, page: &Page) -> String {
    let mut out = String::new();
    for repair in repairs {
        if let Some(text) = sentence(repair, cause) {
            let text = format!("{BOLD}Loss repair:{RESET} {text}");
            out += &paragraph("", "", &text, page.width);
        }
    }
    if !out.is_empty() {
        out.insert(0, '\n');
    }
    out
}

fn sentence(repair: &LossRepair, cause: Cause) -> Option<String> {
    let peer = printable(&repair.peer);
    let lost = repair.restored + repair.not_restored;
    let counts = || {
        let restored = repair.restored;
        format!("{restored} of {lost} packets lost on the path to {peer} were restored")
    };
    let off = match repair.state {
        Some(RepairState::Congested) => {
            Some("the losses are those of a full queue, which TCP has to see")
        }
        Some(RepairState::TooMuchLoss) => Some("more than 8 % are lost"),
        _ => None,
    };
    match (repair.state, off) {
        (_, Some(reason)) => Some(format!("off for {peer}: {reason}.")),
        (Some(RepairState::Repairing), _) if lost == 0 => Some(format!("on for {peer}.")),
        (Some(RepairState::Repairing), _) if repair.restored >= 19 * repair.not_restored => {
            let loss = rounded(100.0 * repair.loss);
            Some(format!(
                "{}, so connections hardly notice that {loss} % are lost.",
                counts()
            ))
        }
        (Some(_), _) if lost > 0 => Some(format!("{}.", counts())),
        (None, _) if cause == Cause::PathLoss => Some(format!(
            "off for {peer}. With `repair = \"auto\"` at both ends, lost packets are restored without the connections \
             noticing."
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        serde_json::from_str(include_str!("../../../../node/testdata/status.json")).unwrap()
    }

    #[test]
    fn only_losses_during_the_measurement_count() {
        let before = status();
        let mut after = status();
        let with_repair = |peer: &PeerStatus| peer.path.repair.is_some();
        let index = after.peers.iter().position(with_repair).unwrap();
        let repair = after.peers[index].path.repair.as_mut().unwrap();
        repair.state = RepairState::Repairing;
        repair.loss = 0.011;
        repair.restored += 132;
        repair.not_restored += 2;
        after.peers[index].traffic.outbound.packets_out += LEAST_PACKETS;
        let found = between(&before, &after);
        let name = after.peers[index].name.clone().unwrap();
        let found = found.iter().find(|repair| repair.peer == name).unwrap();
        assert_eq!((found.restored, found.not_restored), (132, 2));
        assert_eq!(
            sentence(found, Cause::Healthy).unwrap(),
            format!(
                "132 of 134 packets lost on the path to {name} were restored, so connections hardly notice that 1.1 % \
                 are lost."
            )
        );
    }

    #[test]
    fn a_path_without_repair_is_named_only_if_loss_is_the_cause() {
        let off = LossRepair {
            peer: "branch".into(),
            state: None,
            loss: 0.0,
            restored: 0,
            not_restored: 0,
        };
        assert_eq!(sentence(&off, Cause::Bufferbloat), None);
        let text = sentence(&off, Cause::PathLoss).unwrap();
        assert!(
            text.starts_with("off for branch. With `repair = \"auto\"`"),
            "{text}"
        );
        let half = LossRepair {
            state: Some(RepairState::Repairing),
            loss: 0.05,
            restored: 10,
            not_restored: 10,
            ..off.clone()
        };
        let expected = "10 of 20 packets lost on the path to branch were restored.";
        assert_eq!(sentence(&half, Cause::Healthy).unwrap(), expected);
        let congested = LossRepair {
            state: Some(RepairState::Congested),
            ..off
        };
        let text = sentence(&congested, Cause::Bufferbloat).unwrap();
        assert!(
            text.starts_with("off for branch: the losses are those of a full queue"),
            "{text}"
        );
    }
}
