//! Faults of the wire between the hosts.

use super::{Applied, FaultKind};
use crate::error::{Result, setup};
use crate::site::{Hosts, LinkKind};
use crate::wire::Faults;

/// How long frames are held back, in microseconds: longer than a sender waits before it takes them
/// for lost, which is at most a round trip (RFC 8985, section 6.2).
const REORDER_DELAY_US: u64 = 30_000;

/// Adds a fault to those of the emulated link.
pub(super) fn set<'a>(
    kind: FaultKind,
    severity: f64,
    hosts: &'a Hosts,
    applied: &mut Applied<'a>,
) -> Result<()> {
    let (Some(wire), LinkKind::Wire(before)) = (&hosts.wire, hosts.link.kind) else {
        return Err(setup(
            "the link of this fault is not emulated: this is a bug",
        ));
    };
    let mut faults = before;
    faults.a_to_b = with(kind, severity, faults.a_to_b).unwrap_or(faults.a_to_b);
    if kind == FaultKind::WireDelay {
        faults.b_to_a.delay_us = faults.a_to_b.delay_us;
    }
    wire.set(faults)?;
    applied.then(move || {
        // The wire may have ended.
        let _ = wire.set(before);
    });
    Ok(())
}

/// Adds a fault; `None` if it is not a fault of a wire.
pub(super) fn with(kind: FaultKind, severity: f64, mut faults: Faults) -> Option<Faults> {
    let share = severity / 100.0;
    match kind {
        FaultKind::WireDelay => faults.delay_us = (severity * 1e3) as u64,
        FaultKind::WireLoss => faults.loss = share,
        FaultKind::WireReorder => {
            faults.reorder = share;
            faults.reorder_us = REORDER_DELAY_US;
        }
        FaultKind::WireBlackHole => faults.black_hole_bytes = Some(severity as u32),
        FaultKind::WireRate => faults.rate_bits = (severity * 1e6) as u64,
        FaultKind::BrokenChecksum => faults.broken_checksum = share,
        FaultKind::BrokenSegmentation => faults.broken_segmentation = share,
        _ => return None,
    }
    Some(faults)
}
