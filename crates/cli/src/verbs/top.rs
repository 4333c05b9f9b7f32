//! `seikan top`: shows a tunnel live in a terminal: throughput, the doctor's verdict about the last
//! seconds, and the load along the path.
//!
//! [`window`] keeps the last seconds of samples, [`screen`] draws them with `ratatui`.

mod screen;
mod window;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use screen::{Repairs, View};
use seikan_diagnose::diagnose;
use seikan_sys::sample::Sampler;
use seikan_ui::Interrupt;
use window::Window;

use super::doctor::{loss_repair, measure};

/// Interval of samples: short enough for means of gauges, and long enough to use at most a
/// hundredth of a processor.
const INTERVAL: Duration = Duration::from_millis(200);
/// Time that the verdict covers.
const LOOK: Duration = Duration::from_secs(10);
/// Maximum number of intervals in the history of the throughput.
const HISTORY: usize = 600;

/// Options of `top`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan top                     watch the busiest tunnel\n  \
    sudo seikan top --iface tun0 --expect 900\n\n\
    Keys: space pauses, q quits. The verdict is the doctor's for the last 10 s. The command changes nothing, sends \
    nothing and reads no packets. For programs, use `seikan doctor --json`.")]
pub struct Arguments {
    #[command(flatten)]
    tunnel: measure::TunnelArguments,
    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10))]
    every: u32,
}

/// Shows the tunnel until the user presses `q`.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot watch the tunnel";
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("cannot draw without a terminal; use `seikan doctor --json` for a program or a file");
    }
    let map = arguments.tunnel.path().context(FAILED)?;
    let mut sampler = Sampler::new(&map).context(FAILED)?;
    sampler.follow(&measure::through(&map));
    let interrupt = Interrupt::new();
    // Reading from a closed terminal would never end.
    let _signals = interrupt.catch_signals_but_hangup()?;
    let every = Duration::from_secs(arguments.every.into());
    let repairs = watch_repairs(loss_repair::Watch::start(&map), every);
    let mut window = Window::new(map, arguments.tunnel.expected(), HISTORY);
    // Restores the terminal also after a panic.
    let mut terminal = ratatui::try_init().context("cannot draw in this terminal")?;
    let shown = watch(
        &mut terminal,
        &mut sampler,
        &repairs,
        &mut window,
        every,
        &interrupt,
    );
    ratatui::restore();
    shown.map(|()| ExitCode::SUCCESS)
}

/// Queries the tunnel again and again, in a thread: a tunnel that hangs must not stop the screen.
fn watch_repairs(watch: Option<loss_repair::Watch>, every: Duration) -> Arc<Mutex<Repairs>> {
    let newest = Arc::new(Mutex::new(Repairs::default()));
    if let Some(mut watch) = watch {
        let newest = Arc::clone(&newest);
        std::thread::spawn(move || {
            let mut requested_at = Instant::now();
            loop {
                std::thread::sleep(every);
                let Some(found) = watch.next() else { continue };
                let time = requested_at.elapsed();
                requested_at += time;
                *newest.lock().unwrap_or_else(PoisonError::into_inner) = Repairs { found, time };
            }
        });
    }
    newest
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    sampler: &mut Sampler,
    repairs: &Mutex<Repairs>,
    window: &mut Window,
    every: Duration,
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    let mut is_paused = false;
    let mut view: Option<View> = None;
    let mut next_picture = Instant::now() + INTERVAL * 2;
    loop {
        window.push(sampler);
        let due = Instant::now() >= next_picture;
        if due {
            next_picture += every;
            window.remember(every);
            if !is_paused {
                view = Some(View {
                    now: window.evidence(every),
                    verdict: diagnose(&window.evidence(LOOK)),
                    repairs: repairs
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .clone(),
                    history: window.history(),
                    every,
                    is_paused,
                });
            }
        }
        let drawn = view.as_mut().filter(|_| due);
        if let Some(view) = drawn {
            view.is_paused = is_paused;
            terminal.draw(|frame| screen::draw(frame, view))?;
        }
        let sampled = Instant::now();
        while let Some(left) = INTERVAL.checked_sub(sampled.elapsed()) {
            if interrupt.is_raised() {
                return Ok(());
            }
            if !event::poll(left)? {
                break;
            }
            match pressed(&event::read()?) {
                Some(Key::Quit) => return Ok(()),
                Some(Key::Pause) => is_paused = !is_paused,
                None => {}
            }
            if let Some(view) = &mut view {
                view.is_paused = is_paused;
                terminal.draw(|frame| screen::draw(frame, view))?;
            }
        }
    }
}

enum Key {
    Quit,
    Pause,
}

fn pressed(event: &Event) -> Option<Key> {
    let Event::Key(key) = event else {
        return None;
    };
    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        _ if key.kind != KeyEventKind::Press => None,
        KeyCode::Char('c') if is_control => Some(Key::Quit),
        KeyCode::Char('q') | KeyCode::Esc => Some(Key::Quit),
        KeyCode::Char(' ') => Some(Key::Pause),
        _ => None,
    }
}
