//! Seikan's WireGuard against other implementations, each test in its own namespaces.
//!
//! `a` is Seikan in all asymmetric tests. The end that knows the other's endpoint initiates.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use seikan_interop::{Implementation, Knows, Setup, Side, Stream, Tunnel, Underlay};

/// Bytes per second; leaves capacity of two cores for other tests.
const CALM: u64 = 2_000_000;
/// `REKEY_AFTER_TIME` of the WireGuard paper, section 6.1.
const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
/// `KEEPALIVE_TIMEOUT` + `REKEY_TIMEOUT`: without an answer for this long a peer starts a new
/// handshake (section 6.5).
const NEW_HANDSHAKE: Duration = Duration::from_secs(15);

/// Defines the same tests against each implementation.
macro_rules! against {
    ($($module:ident: $implementation:expr;)*) => {$(
        mod $module {
            use super::*;
            const OTHER: Implementation = $implementation;

            #[test]
            fn seikan_initiates() -> Result<()> {
                carries_everything(Setup::new(Implementation::under_test(), OTHER))
            }

            #[test]
            fn the_other_initiates() -> Result<()> {
                carries_everything(Setup { knows: Knows::B, ..Setup::new(Implementation::under_test(), OTHER) })
            }

            #[test]
            fn seikan_initiates_over_ipv6_with_a_preshared_key() -> Result<()> {
                let setup = Setup::new(Implementation::under_test(), OTHER);
                carries_everything(Setup { underlay: Underlay::V6, preshared_key: true, ..setup })
            }

            #[test]
            fn the_other_initiates_over_ipv6_with_a_preshared_key() -> Result<()> {
                let setup = Setup { knows: Knows::B, ..Setup::new(Implementation::under_test(), OTHER) };
                carries_everything(Setup { underlay: Underlay::V6, preshared_key: true, ..setup })
            }

            #[test]
            fn a_wrong_preshared_key_carries_nothing() -> Result<()> {
                without_the_right_preshared_key(Setup::new(Implementation::under_test(), OTHER))
            }

            #[test]
            fn seikan_roams() -> Result<()> {
                roams(Setup::new(Implementation::under_test(), OTHER), |tunnel| &mut tunnel.a)
            }

            #[test]
            fn the_other_roams() -> Result<()> {
                roams(Setup { knows: Knows::B, ..Setup::new(Implementation::under_test(), OTHER) }, |tunnel| &mut tunnel.b)
            }

            #[test]
            fn seikan_is_killed_and_restarted() -> Result<()> {
                survives_a_kill(Setup { knows: Knows::Both, ..Setup::new(Implementation::under_test(), OTHER) }, |tunnel| &mut tunnel.a)
            }

            #[test]
            fn the_other_is_killed_and_restarted() -> Result<()> {
                survives_a_kill(Setup { knows: Knows::Both, ..Setup::new(Implementation::under_test(), OTHER) }, |tunnel| &mut tunnel.b)
            }

            #[test]
            fn seikan_rekeys_under_load() -> Result<()> {
                rekeys_under_load(Setup::new(Implementation::under_test(), OTHER))
            }

            #[test]
            fn the_other_rekeys_under_load() -> Result<()> {
                rekeys_under_load(Setup { knows: Knows::B, ..Setup::new(Implementation::under_test(), OTHER) })
            }
        }
    )*};
}

against! {
    wireguard_go: Implementation::WireguardGo;
    boringtun: Implementation::Boringtun;
}

/// Both inner families, both directions, small and full-sized packets, and a verified stream.
fn carries_everything(setup: Setup) -> Result<()> {
    let Some(tunnel) = Tunnel::up(setup)? else {
        return Ok(());
    };
    // The end that knows the endpoint initiates.
    let (first, second) = if setup.knows == Knows::B {
        (&tunnel.b, &tunnel.a)
    } else {
        (&tunnel.a, &tunnel.b)
    };
    tunnel.ping(second, false, 3, 56)?;
    tunnel.ping(first, true, 3, 56)?;
    // 1420 bytes of inner MTU without the IPv4 and ICMP headers.
    tunnel.ping(second, false, 2, 1420 - 28)?;
    for (to, v6) in [(&tunnel.a, false), (&tunnel.b, true)] {
        let report = Stream::start(&tunnel, to, v6, None, Duration::from_secs(1))?
            .finish()
            .with_context(|| tunnel.logs())?;
        ensure!(
            report.bytes > 1_000_000,
            "only {} bytes in a second",
            report.bytes
        );
    }
    ensure!(tunnel.b.handshake_age()?.is_some());
    Ok(())
}

fn without_the_right_preshared_key(setup: Setup) -> Result<()> {
    let Some(tunnel) = Tunnel::up(Setup {
        preshared_key: true,
        ..setup
    })?
    else {
        return Ok(());
    };
    tunnel.ping(&tunnel.b, false, 1, 56)?;
    let Some(other) = Tunnel::up_with_unequal_preshared_keys(setup)? else {
        return Ok(());
    };
    ensure!(
        other
            .time_to_answer(&other.b, Duration::from_secs(7))
            .is_err(),
        "an answer came through"
    );
    ensure!(other.b.handshake_age()?.is_none() && other.a.handshake_age()?.is_none());
    Ok(())
}

/// A stream continues while one end changes its address and port, and the other end follows.
fn roams(setup: Setup, side_of: fn(&mut Tunnel) -> &mut Side) -> Result<()> {
    let Some(mut tunnel) = Tunnel::up(setup)? else {
        return Ok(());
    };
    let mover = side_of(&mut tunnel).interface.clone();
    let still = if tunnel.a.interface == mover {
        &tunnel.b
    } else {
        &tunnel.a
    };
    tunnel.ping(still, false, 1, 56)?;
    let stream = Stream::start(&tunnel, still, false, Some(CALM), Duration::from_secs(8))?;
    thread::sleep(Duration::from_secs(2));
    side_of(&mut tunnel).roam("10.66.0.77".parse()?, 40404)?;
    let report = stream.finish().with_context(|| tunnel.logs())?;
    report.no_gap_of(Duration::from_secs(5))?;
    let still = if tunnel.a.interface == mover {
        &tunnel.b
    } else {
        &tunnel.a
    };
    let seen = still.show("endpoints")?;
    ensure!(
        seen == "10.66.0.77:40404",
        "the end that stayed sends to {seen}"
    );
    Ok(())
}

/// One end is killed and restarted with its configuration only.
fn survives_a_kill(setup: Setup, side_of: fn(&mut Tunnel) -> &mut Side) -> Result<()> {
    let Some(mut tunnel) = Tunnel::up(setup)? else {
        return Ok(());
    };
    let victim = side_of(&mut tunnel).interface.clone();
    let is_a = tunnel.a.interface == victim;
    let before = tunnel.time_to_answer(
        if is_a { &tunnel.a } else { &tunnel.b },
        Duration::from_secs(10),
    )?;
    ensure!(
        before < Duration::from_secs(6),
        "the first handshake took {before:?}"
    );
    side_of(&mut tunnel).kill()?;
    side_of(&mut tunnel).start()?;
    // Only the surviving end has data to send: it must detect that its session is dead.
    let time = tunnel.time_to_answer(
        if is_a { &tunnel.a } else { &tunnel.b },
        Duration::from_secs(60),
    )?;
    ensure!(
        time < NEW_HANDSHAKE + Duration::from_secs(6),
        "recovered only after {time:?}"
    );
    Ok(())
}

/// A stream outlives its first session; a lost rekey would stop it for `REKEY_TIMEOUT`, five
/// seconds.
fn rekeys_under_load(setup: Setup) -> Result<()> {
    let Some(tunnel) = Tunnel::up(setup)? else {
        return Ok(());
    };
    let (initiator, responder) = if setup.knows == Knows::B {
        (&tunnel.b, &tunnel.a)
    } else {
        (&tunnel.a, &tunnel.b)
    };
    tunnel.ping(responder, false, 1, 56)?;
    let stream = Stream::start(
        &tunnel,
        responder,
        false,
        Some(CALM),
        REKEY_AFTER_TIME + Duration::from_secs(10),
    )?;
    let report = stream.finish().with_context(|| tunnel.logs())?;
    report.no_gap_of(Duration::from_secs(2))?;
    for side in [initiator, responder] {
        let age = side.handshake_age()?.context("no handshake")?;
        ensure!(
            age < Duration::from_secs(30),
            "{:?} has not completed another handshake",
            side.implementation
        );
    }
    Ok(())
}
