//! Ten minutes at full speed through our own tunnel (`make soak`): no leak, no stall, every byte checked, several rekeys.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use seikan_interop::{Implementation, Knows, Setup, Stream, Tunnel};

/// After this long every buffer has reached its size.
const WARM: Duration = Duration::from_secs(60);
/// What memory may grow by after that, in KiB: parts of the receive and send batches that nothing has needed yet. A leak of
/// one byte for every forty packets is more.
const GROWTH: u64 = 6 * 1024;

fn soak(ours: Implementation) -> Result<()> {
    let Ok(seconds) = std::env::var("SEIKAN_SOAK") else {
        bail!("SEIKAN_SOAK must name the seconds to run (make soak)");
    };
    let duration = Duration::from_secs(seconds.parse().context("SEIKAN_SOAK")?);
    let Some(tunnel) = Tunnel::up(Setup {
        knows: Knows::Both,
        ..Setup::new(ours, ours)
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
        println!("{ours:?}: {warm} KiB resident when warm, {now} KiB at the end");
        ensure!(
            now < warm + GROWTH,
            "resident memory grew from {warm} to {now} KiB"
        );
    }
    for report in reports {
        let report = report?;
        let rate = report.bytes as f64 * 8.0 / 1e9 / duration.as_secs_f64();
        println!(
            "{ours:?}: {rate:.2} Gbit/s, longest gap {:?}",
            report.longest_gap
        );
        report.no_gap_of(Duration::from_secs(1))?;
    }
    Ok(())
}

#[test]
#[ignore = "minutes: make soak"]
fn wireguard() -> Result<()> {
    soak(Implementation::ours())
}

#[test]
#[ignore = "minutes: make soak"]
fn native() -> Result<()> {
    soak(Implementation::SeikanNative)
}
