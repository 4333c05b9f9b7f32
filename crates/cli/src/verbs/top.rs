//! `seikan top`: a tunnel in a terminal, as it is now: what goes through, what the doctor makes of the last seconds, and
//! who does what along the path.
//!
//! [`window`] keeps the last seconds of samples, [`screen`] draws them with `ratatui`.

mod screen;
mod window;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use screen::View;
use seikan_diagnose::diagnose;
use seikan_sys::sample::Sampler;
use seikan_ui::Interrupt;
use window::Window;

use super::doctor::measure;

/// Between two samples: enough for means of gauges, few enough to cost a hundredth of a processor at most.
const INTERVAL: Duration = Duration::from_millis(200);
/// What the doctor looks at.
const LOOK: Duration = Duration::from_secs(10);
/// The picture of the throughput begins so long ago, at most.
const HISTORY: usize = 600;

/// What `top` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan top                     the tunnel that carries most\n  \
    sudo seikan top --iface tun0 --expect 900\n\n\
    Keys: space holds the picture, q ends. The verdict is the doctor's over the last 10 s. It changes nothing, sends \
    nothing and reads no packet. For a program there is `seikan doctor --json`.")]
pub struct Arguments {
    #[command(flatten)]
    tunnel: measure::TunnelArguments,
    /// Seconds between two pictures
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10))]
    every: u32,
}

/// Shows it until somebody presses `q`.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot watch the tunnel";
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("it needs a terminal; for a program or a file there is `seikan doctor --json`");
    }
    let map = arguments.tunnel.path().context(FAILED)?;
    let mut sampler = Sampler::new(&map).context(FAILED)?;
    sampler.follow(&measure::through(&map));
    let interrupt = Interrupt::new();
    // Reading from a terminal that is gone would never end.
    let _signals = interrupt.catch_signals_but_hangup()?;
    let mut window = Window::new(map, arguments.tunnel.expected(), HISTORY);
    let every = Duration::from_secs(arguments.every.into());
    // Puts the terminal back also where something panics.
    let mut terminal = ratatui::try_init().context("cannot draw in this terminal")?;
    let shown = watch(&mut terminal, &mut sampler, &mut window, every, &interrupt);
    ratatui::restore();
    shown.map(|()| ExitCode::SUCCESS)
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    sampler: &mut Sampler,
    window: &mut Window,
    every: Duration,
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    let mut is_held = false;
    let mut view: Option<View> = None;
    let mut next_picture = Instant::now() + INTERVAL * 2;
    loop {
        window.push(sampler);
        let due = Instant::now() >= next_picture;
        if due {
            next_picture += every;
            window.remember(every);
            if !is_held {
                view = Some(View {
                    now: window.evidence(every),
                    verdict: diagnose(&window.evidence(LOOK)),
                    history: window.history(),
                    every,
                    is_held,
                });
            }
        }
        let drawn = view.as_mut().filter(|_| due);
        if let Some(view) = drawn {
            view.is_held = is_held;
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
                Some(Key::Hold) => is_held = !is_held,
                None => {}
            }
            if let Some(view) = &mut view {
                view.is_held = is_held;
                terminal.draw(|frame| screen::draw(frame, view))?;
            }
        }
    }
}

enum Key {
    Quit,
    Hold,
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
        KeyCode::Char(' ') => Some(Key::Hold),
        _ => None,
    }
}
