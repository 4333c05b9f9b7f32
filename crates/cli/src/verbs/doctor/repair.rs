//! `--prove`: tries what should help on this host, which shows what the cause is. `--fix` keeps it if it does, and
//! `--undo` takes it back.

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
use crate::screen::printable;

/// Remedies that are tried, at most.
const MOST: usize = 2;

/// How to go about it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Do not ask.
    pub yes: bool,
    /// Print nothing.
    pub quiet: bool,
    /// Gain that a change must have to stay, as a share; `None`: it is taken back in any case, and was a proof only.
    pub keep: Option<f64>,
}

/// Tries what the two likeliest causes would be helped by, until something does. A gain that is sure confirms its
/// cause, and makes it the verdict.
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
        say("\nnothing to change on this host");
        return Ok(Vec::new());
    }
    let watchdog = Watchdog::start();
    let watched: Vec<String> = watchdog.watched().iter().map(ToString::to_string).collect();
    say(&match watched.is_empty() {
        true => {
            "\nno router and no SSH client answers echo requests: only the tunnel is watched over"
                .to_owned()
        }
        false => format!(
            "\nwatched over meanwhile: the tunnel, and {}",
            watched.join(", ")
        ),
    });
    let mut attempts = Vec::new();
    for (of, remedy) in candidates {
        // Names of programs are in them.
        let what = printable(&remedy.what);
        say(&format!("\ntrying, as if it were {}: {what}", of.cause));
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
            say("left as it is");
            continue;
        }
        let begun = Instant::now();
        let bar = ProgressBar::new();
        let trial = fix.run(&changes, options.keep, |length| {
            let whole = (WARM_UP + BLOCK).as_secs_f64() * 2.0 * PAIRS as f64;
            bar.show(Progress {
                fraction: (begun.elapsed().as_secs_f64() / whole).min(1.0),
                step: "with and without it, in turns".to_owned(),
            });
            let evidence = measure::watch(&verdict.path, length, interrupt)?;
            Ok(match watchdog.silent() {
                None => Look::Block(block(&evidence)),
                Some(host) => Look::CutOff(format!("{host} does not answer this host any more")),
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
            say(&format!("\nproven: {}. {}", of.cause, of.sentence));
        }
        // A gain that proves the cause may be too small to stay for: another remedy may do more.
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

/// What can be changed here, with the verdict that proposes it. Where one cause is clear, its own remedies come first;
/// otherwise one of each of the two.
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
        candidates.truncate(MOST - 1);
    }
    candidates.extend(others);
    candidates.truncate(MOST);
    candidates
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

fn agreed(keep: bool) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("it asks before it changes something, and there is no terminal to ask on: add --yes");
    }
    print!(
        "make the change, compare, and {}? [y/N] ",
        if keep {
            "keep it if it helps"
        } else {
            "take it back"
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
    let how = match &trial.decision {
        Decision::Keep => "  kept; `seikan doctor --undo` takes it back".to_owned(),
        Decision::TakeBack(why) => format!("  taken back: {}", printable(why)),
        Decision::NotPossible(why) => return format!("  not possible here: {}", printable(why)),
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
        let told = described(&Trial::not_possible("no such setting".into()));
        assert_eq!(told, "  not possible here: no such setting");
    }

    #[test]
    fn a_verdict_can_be_confirmed_within_a_minute() {
        let trial = (WARM_UP + BLOCK) * 2 * PAIRS as u32;
        assert!(trial.as_secs() * MOST as u64 <= 60);
    }
}
