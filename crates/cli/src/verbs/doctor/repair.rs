//! Tests remedies on this host. `--prove` reverts them, `--fix` keeps one that helps, and `--undo`
//! reverts the remedies that were kept.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;
use seikan_diagnose::trial::{Attempt, BLOCK, Block, Decision, Look, PAIRS, Trial, WARM_UP};
use seikan_diagnose::{Evidence, Level, Remedy, Verdict};
use seikan_observe::metric;
use seikan_ui::{Interrupt, Progress, ProgressBar};

use super::measure;
use crate::fix::watchdog::Watchdog;
use crate::fix::{self, Fix};
use crate::screen::{joined, printable};

/// Maximum number of remedies that are tested.
const MAX_REMEDIES: usize = 2;

/// Options of the tests.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Do not ask.
    pub yes: bool,
    /// Print nothing.
    pub quiet: bool,
    /// Gain from which a change is kept, as a share; `None`: every change is reverted.
    pub keep: Option<f64>,
}

/// Tests remedies of the two likeliest causes until one helps. A certain gain confirms its cause,
/// which becomes the verdict.
pub fn repair(
    verdict: &Verdict,
    evidence: &Evidence,
    fix: &Fix,
    options: &Options,
    interrupt: &Interrupt,
) -> anyhow::Result<Vec<Attempt>> {
    let say = |text: &str| {
        if !options.quiet {
            println!("{text}");
        }
    };
    let candidates = candidates(verdict, seikan_diagnose::rival(evidence, verdict));
    if candidates.is_empty() {
        say("\nno remedy changes a setting of this host");
        return Ok(Vec::new());
    }
    let watchdog = Watchdog::start();
    let watched: Vec<String> = watchdog.watched().iter().map(ToString::to_string).collect();
    say(&if watched.is_empty() {
        "\nno router and no SSH client answers echo requests: only the tunnel is monitored"
            .to_owned()
    } else {
        format!(
            "\nmonitored during the test: the tunnel and {}",
            watched.join(", ")
        )
    });
    let mut attempts = Vec::new();
    for (of, remedy) in candidates {
        // The text may contain names of programs, which are untrusted.
        let change = printable(&remedy.what);
        say(&format!("\ntesting against {}: {change}", of.cause));
        for command in &remedy.commands {
            say(&format!("  {}", printable(command)));
        }
        let changes = match Fix::plan(&remedy) {
            Ok(changes) => changes,
            Err(why) => {
                let trial = Trial::not_possible(format!("{why:#}"));
                say(&described(&trial));
                attempts.push(Attempt {
                    cause: of.cause,
                    remedy,
                    trial,
                });
                continue;
            }
        };
        if !options.yes && !agreed(options.keep.is_some())? {
            say("not changed");
            continue;
        }
        let started = Instant::now();
        let bar = ProgressBar::new();
        let trial = fix.run(&changes, options.keep, |length| {
            let whole = (WARM_UP + BLOCK).as_secs_f64() * 2.0 * PAIRS as f64;
            bar.show(Progress {
                fraction: (started.elapsed().as_secs_f64() / whole).min(1.0),
                step: "with and without the change, alternating".to_owned(),
            });
            let evidence = measure::watch(&verdict.path, length, interrupt)?;
            Ok(match watchdog.silent() {
                None => Look::Block(block(&evidence)),
                Some(host) => Look::CutOff(format!("{host} no longer answers this host")),
            })
        })?;
        drop(bar);
        say(&described(&trial));
        let helps = trial.helps();
        let keeps = trial.decision == Decision::Keep;
        let is_cut_off = watchdog.silent().is_some();
        attempts.push(Attempt {
            cause: of.cause,
            remedy,
            trial,
        });
        if helps {
            say(&format!("\nconfirmed: {}. {}", of.cause, of.sentence));
        }
        // A gain that confirms the cause may be too small to keep the change: another remedy may gain more.
        let is_done = match options.keep {
            Some(_) => keeps,
            None => helps,
        };
        if is_done || is_cut_off {
            break;
        }
    }
    Ok(attempts)
}

/// Returns the remedies that change settings of this host, each with its verdict: two of a clear
/// cause, otherwise one of each of the two causes.
fn candidates(verdict: &Verdict, rival: Option<Verdict>) -> Vec<(Verdict, Remedy)> {
    let here = |verdict: &Verdict| {
        let remedies = verdict.remedies.iter();
        let here = remedies.filter(|remedy| !remedy.actions.is_empty());
        here.map(|remedy| (verdict.clone(), remedy.clone()))
            .collect::<Vec<_>>()
    };
    let mut candidates = here(verdict);
    let others = rival.as_ref().map(here).unwrap_or_default();
    if verdict.level < Level::Supported && !others.is_empty() {
        candidates.truncate(MAX_REMEDIES - 1);
    }
    candidates.extend(others);
    candidates.truncate(MAX_REMEDIES);
    candidates
}

/// Reverts the changes that were kept.
pub fn undo() -> anyhow::Result<ExitCode> {
    let (done, failures) = fix::undo()?;
    for command in &done {
        println!("reverted: {command}");
    }
    if done.is_empty() && failures.is_empty() {
        println!("nothing to revert in this network namespace");
    }
    if !failures.is_empty() {
        bail!("{}", failures.join("; "));
    }
    Ok(ExitCode::SUCCESS)
}

fn agreed(keep: bool) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("cannot ask before a change without a terminal: add --yes");
    }
    print!(
        "make the change, measure, and {}? [y/N] ",
        if keep {
            "keep it if it helps"
        } else {
            "revert it"
        }
    );
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

/// Returns the results of the tests.
pub fn tried(attempts: &[Attempt]) -> String {
    let tests = attempts.iter().map(|attempt| {
        let change = printable(&attempt.remedy.what);
        format!("\ntested: {change}\n{}\n", described(&attempt.trial))
    });
    tests.collect()
}

fn described(trial: &Trial) -> String {
    let rates = |of: &dyn Fn(&(Block, Block)) -> Block| {
        let rates = trial.pairs.iter().map(|pair| of(pair).throughput / 1e6);
        joined(rates.map(|rate| format!("{rate:.0}")), ", ")
    };
    let how = match &trial.decision {
        Decision::Keep => "  kept; `seikan doctor --undo` reverts it".to_owned(),
        Decision::TakeBack(why) => format!("  reverted: {}", printable(why)),
        Decision::NotPossible(why) => return format!("  not possible here: {}", printable(why)),
    };
    let mut out = format!(
        "  without the change {} Mbit/s\n  with the change    {} Mbit/s\n",
        rates(&|pair| pair.0),
        rates(&|pair| pair.1)
    );
    if let Some(gain) = trial.gain {
        out += &format!(
            "  gain {:+.0} % (95 % interval: {:+.0} to {:+.0})\n",
            gain.value * 100.0,
            gain.low * 100.0,
            gain.high * 100.0
        );
    }
    out + &how
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_diagnose::{Action, Cause, diagnose};

    fn verdict(cause: Cause, remedies: usize) -> Verdict {
        let remedy = Remedy::here("change", vec![], "all");
        Verdict {
            cause,
            remedies: (0..remedies)
                .map(|i| Remedy {
                    what: format!("{cause} {i}"),
                    actions: vec![Action::RemoveQdisc { link: "a".into() }],
                    ..remedy.clone()
                })
                .collect(),
            ..diagnose(&Evidence::default())
        }
    }

    #[test]
    fn the_two_likeliest_causes_are_tried_unless_one_is_clear() {
        let names = |level, first, second| {
            let mut top = verdict(Cause::Shaper, first);
            top.level = level;
            let tried = candidates(&top, Some(verdict(Cause::Bufferbloat, second)));
            let names = tried.into_iter().map(|(_, remedy)| remedy.what);
            names.collect::<Vec<_>>()
        };
        let one_of_each = ["shaper 0", "bufferbloat 0"];
        assert_eq!(names(Level::Consistent, 3, 3), one_of_each);
        assert_eq!(names(Level::Supported, 1, 1), one_of_each);
        let clear = ["shaper 0", "shaper 1"];
        assert_eq!(names(Level::Supported, 3, 3), clear);
        assert_eq!(names(Level::Consistent, 3, 0), clear);
        assert_eq!(names(Level::Supported, 0, 1), ["bufferbloat 0"]);
    }

    #[test]
    fn a_change_that_cannot_be_made_has_no_rates() {
        let text = described(&Trial::not_possible("no such setting".into()));
        assert_eq!(text, "  not possible here: no such setting");
    }

    #[test]
    fn a_verdict_can_be_confirmed_within_a_minute() {
        let trial = (WARM_UP + BLOCK) * 2 * PAIRS as u32;
        assert!(trial.as_secs() * MAX_REMEDIES as u64 <= 60);
    }
}
