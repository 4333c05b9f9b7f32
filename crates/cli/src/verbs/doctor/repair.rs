//! `--fix`: tries what helps on this host, and keeps it if it does. `--undo` takes it back.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;
use seikan_diagnose::trial::{Attempt, BLOCK, Block, Decision, PAIRS, Trial, WARM_UP};
use seikan_diagnose::{Evidence, Level, Remedy, Verdict};
use seikan_lab::report::ProgressBar;
use seikan_lab::{Interrupt, Progress};
use seikan_observe::metric;

use super::measure;
use crate::fix::{self, Fix};
use crate::screen::printable;

/// Remedies that are tried, at most: of the cause and of its chain.
const MOST: usize = 2;

/// How to go about it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Do not ask.
    pub yes: bool,
    /// Print nothing.
    pub quiet: bool,
    /// Gain that a change must have to stay, as a share.
    pub least_gain: f64,
}

/// Tries the remedies of a verdict until one stays. A gain that is sure confirms the verdict.
pub fn repair(
    verdict: &mut Verdict,
    fix: &Fix,
    options: &Options,
    interrupt: &Interrupt,
) -> anyhow::Result<Vec<Attempt>> {
    let say = |text: &str| {
        if !options.quiet {
            println!("{text}");
        }
    };
    let remedies = verdict.remedies.iter();
    let here = remedies.filter(|remedy| !remedy.actions.is_empty());
    let here: Vec<Remedy> = here.take(MOST).cloned().collect();
    if here.is_empty() {
        say("\nnothing to change on this host");
    }
    let mut attempts = Vec::new();
    for remedy in here {
        say(&format!("\ntrying: {}", remedy.what));
        for command in &remedy.commands {
            say(&format!("  {command}"));
        }
        if !options.yes && !agreed()? {
            say("left as it is");
            continue;
        }
        let begun = Instant::now();
        let bar = ProgressBar::new();
        let trial = fix.run(&remedy, options.least_gain, |length| {
            let whole = (WARM_UP + BLOCK).as_secs_f64() * 2.0 * PAIRS as f64;
            bar.show(Progress {
                fraction: (begun.elapsed().as_secs_f64() / whole).min(1.0),
                what: "with and without it, in turns".to_owned(),
            });
            let evidence = measure::watch(&verdict.path, length, interrupt)?;
            Ok(block(&evidence))
        })?;
        drop(bar);
        say(&described(&trial));
        if trial.helps() {
            verdict.level = Level::Confirmed;
        }
        let keeps = trial.decision == Decision::Keep;
        attempts.push(Attempt { remedy, trial });
        if keeps {
            break;
        }
    }
    Ok(attempts)
}

/// Takes back what was kept.
pub fn undo() -> anyhow::Result<ExitCode> {
    let (done, failures) = fix::undo()?;
    for command in &done {
        println!("taken back: {command}");
    }
    if done.is_empty() && failures.is_empty() {
        println!("nothing to take back in this network namespace");
    }
    if !failures.is_empty() {
        bail!("{}", failures.join("; "));
    }
    Ok(ExitCode::SUCCESS)
}

fn agreed() -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!(
            "--fix asks before it changes something, and there is no terminal to ask on: add --yes"
        );
    }
    print!("apply it, compare, and keep it if it helps? [y/N] ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn block(evidence: &Evidence) -> Block {
    let rtts = evidence
        .main_flow()
        .and_then(|flow| evidence.tcp_mean(flow, metric::TCP_RTT_US));
    let idle = evidence.idle();
    let cpus = idle.len() as f64;
    Block {
        throughput: evidence.throughput(),
        rtt_us: rtts,
        loss: evidence.retransmitted(),
        busy: cpus - idle.iter().map(|(_, share)| share).sum::<f64>(),
    }
}

/// What came of remedies that were tried.
pub fn tried(attempts: &[Attempt]) -> String {
    let told = attempts.iter().map(|attempt| {
        let what = printable(&attempt.remedy.what);
        format!("\ntried: {what}\n{}\n", described(&attempt.trial))
    });
    told.collect()
}

fn described(trial: &Trial) -> String {
    let rates = |of: &dyn Fn(&(Block, Block)) -> Block| {
        let rates = trial.pairs.iter().map(|pair| of(pair).throughput / 1e6);
        rates
            .map(|rate| format!("{rate:.0}"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut out = format!(
        "  without it {} Mbit/s\n  with it    {} Mbit/s\n",
        rates(&|pair| pair.0),
        rates(&|pair| pair.1)
    );
    if let Some(gain) = trial.gain {
        out += &format!(
            "  gain {:+.0} % ({:+.0} to {:+.0}, 95 %)\n",
            gain.value * 100.0,
            gain.low * 100.0,
            gain.high * 100.0
        );
    }
    out + &match &trial.decision {
        Decision::Keep => "  kept; `seikan doctor --undo` takes it back".to_owned(),
        Decision::TakeBack(why) => format!("  taken back: {}", printable(why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_can_be_confirmed_within_a_minute() {
        let trial = (WARM_UP + BLOCK) * 2 * PAIRS as u32;
        assert!(trial.as_secs() * MOST as u64 <= 60);
    }
}
