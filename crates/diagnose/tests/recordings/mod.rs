//! Recordings of tunnels that were made slow on purpose, diagnosed by the current rules. The test
//! takes a second and needs neither root nor a tunnel. It shows a change by which the rules no
//! longer name a cause. `make recordings` records the cases again.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use seikan_diagnose::{Cause, diagnose};

mod packed;

/// Minimum number of cases in the file.
const LEAST: usize = 150;
/// Minimum number of correctly named cases of each cause. Some are low: the recordings are of a
/// machine with two cores that was busy with other work, where a fault of a processor hardly shows.
const FLOORS: &[(Cause, usize)] = &[
    (Cause::TunQueueOverflow, 10),      // of 10
    (Cause::FramePerSyscall, 1),        // of 1
    (Cause::CpuContention, 8),          // of 9
    (Cause::CpuQuota, 15),              // of 15
    (Cause::SoftirqOneCore, 2),         // of 5
    (Cause::SingleThreadSaturated, 5),  // of 5
    (Cause::BacklogFull, 5),            // of 5
    (Cause::ConntrackFull, 5),          // of 5
    (Cause::OuterFlowCannotSpread, 5),  // of 5
    (Cause::UdpReceiveBuffer, 10),      // of 10
    (Cause::UdpSendBuffer, 2),          // of 2
    (Cause::TcpOuterBuffer, 5),         // of 5
    (Cause::TcpReceiveWindow, 5),       // of 5
    (Cause::ApplicationLimited, 4),     // of 4
    (Cause::PathLoss, 6),               // of 10
    (Cause::PathDelay, 5),              // of 5
    (Cause::Reordering, 5),             // of 5
    (Cause::TcpOverTcp, 7),             // of 10
    (Cause::MtuBlackHole, 10),          // of 10
    (Cause::OuterFragmentation, 5),     // of 5
    (Cause::MtuMismatch, 5),            // of 5
    (Cause::PacketsTooSmall, 4),        // of 5
    (Cause::GroBreaksEncapsulation, 5), // of 5
    (Cause::OffloadMissing, 9),         // of 10
    (Cause::OffloadBroken, 5),          // of 10
    (Cause::CipherBound, 5),            // of 5
    (Cause::CopyOrChecksumBound, 1),    // of 2
    (Cause::HandoffOverhead, 5),        // of 5
    (Cause::Shaper, 10),                // of 12
    (Cause::Bufferbloat, 4),            // of 4
    (Cause::VirtualSwitchUpcalls, 4),   // of 4
    (Cause::Healthy, 9),                // of 9
];

#[test]
fn causes_of_recorded_cases_are_named_as_often_as_before() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings/cases.jsonl.gz");
    let file = File::open(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let mut named: BTreeMap<Cause, (usize, usize)> = BTreeMap::new();
    let (mut count, mut alarms) = (0, Vec::new());
    for case in packed::read(file) {
        let found = diagnose(&case.evidence()).cause;
        let (id, cause, is_right) = (&case.id, case.cause, case.is_right(found));
        count += 1;
        let entry = named.entry(cause).or_default();
        entry.0 += usize::from(is_right);
        entry.1 += 1;
        if !is_right {
            println!("{id}: {found}");
        }
        if cause == Cause::Healthy && found.is_fault() {
            alarms.push(format!("{id}: {found}"));
        }
    }
    for (cause, (right, of)) in &named {
        println!("    (Cause::{cause:?}, {right}), // of {of}");
    }
    assert!(count >= LEAST, "{count} cases");
    assert!(
        alarms.is_empty(),
        "healthy tunnels with a wrong cause: {alarms:?}"
    );
    for (cause, floor) in FLOORS {
        let (right, of) = named.get(cause).copied().unwrap_or_default();
        assert!(right >= *floor, "{cause}: {right} of {of}, {floor} before");
    }
}
