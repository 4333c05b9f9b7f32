//! Ten minutes at full speed through a tunnel (`make soak`): no leak, no stall, every byte
//! verified, several rekeys.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use seikan_interop::{Implementation, Knows, Setup, Stream, Tunnel};

/// Time after which every buffer has reached its size.
const WARM: Duration = Duration::from_secs(60);
/// Maximum growth of memory after that, in KiB: unused parts of the receive and send batches. A
/// leak of one byte per forty packets exceeds it.
const GROWTH: u64 = 6 * 1024;

fn soak(implementation: Implementation) -> Result<()> {
    let Ok(seconds) = std::env::var("SEIKAN_SOAK") else {
        bail!("SEIKAN_SOAK must name the seconds to run (make soak)");
    };
    let duration = Duration::from_secs(seconds.parse().context("SEIKAN_SOAK")?);
    let Some(tunnel) = Tunnel::up(Setup {
        knows: Knows::Both,
        ..Setup::new(implementation, implementation)
    })?
    else {
        return Ok(());
    };
    tunnel.ping(&tunnel.b, false, 1, 56)?;
    let forth = Stream::start(&tunnel, &tunnel.b, false, None, duration)?;
    let back = Stream::start(&tunnel, &tunnel.a, true, None, duration)?;
    let memory = || -> Result<[u64; 2]> { Ok([tunnel.a.memory()?, tunnel.b.memory()?]) };
    thread::sleep(WARM.min(duration / 2));
    let warm = memory()?;
    let reports =
        [forth.finish(), back.finish()].map(|report| report.with_context(|| tunnel.logs()));
    for (warm, now) in warm.into_iter().zip(memory()?) {
        println!("{implementation:?}: {warm} KiB resident when warm, {now} KiB at the end");
        ensure!(
            now < warm + GROWTH,
            "resident memory grew from {warm} to {now} KiB"
        );
    }
    for report in reports {
        let report = report?;
        let rate = report.bytes as f64 * 8.0 / 1e9 / duration.as_secs_f64();
        println!(
            "{implementation:?}: {rate:.2} Gbit/s, longest gap {:?}",
            report.longest_gap
        );
        report.no_gap_of(Duration::from_secs(1))?;
    }
    Ok(())
}

#[test]
#[ignore = "minutes: make soak"]
fn wireguard() -> Result<()> {
    soak(Implementation::under_test())
}

#[test]
#[ignore = "minutes: make soak"]
fn native() -> Result<()> {
    soak(Implementation::SeikanNative)
}
