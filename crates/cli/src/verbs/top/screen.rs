//! The screen: a title, the verdict, the throughput, and tables of objects on the path.

use std::cmp::Reverse;
use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table, Wrap};
use seikan_diagnose::{Evidence, Level, Severity, Verdict};
use seikan_observe::path::Transport;
use seikan_observe::{Subject, metric};

use super::super::doctor::loss_repair::LossRepair;
use crate::screen::rounded;
use crate::screen::{number, printable};

/// Minimum width of the terminal, in columns, for two tables next to each other.
const WIDE: u16 = 110;
/// Maximum rows of a table.
const ROWS: usize = 6;

/// Content of the screen.
pub struct View {
    /// Evidence of the newest samples.
    pub now: Evidence,
    /// Verdict about the last seconds.
    pub verdict: Verdict,
    /// Loss repair since the last answer of the tunnel.
    pub repairs: Repairs,
    /// Bits per second out and in at each update, the newest last.
    pub history: Vec<(f64, f64)>,
    /// Interval of updates.
    pub every: Duration,
    /// Whether updates are paused.
    pub is_paused: bool,
}

/// Loss repair between two answers of the tunnel.
#[derive(Clone, Default)]
pub struct Repairs {
    /// Peers for which loss repair has something to report.
    pub found: Vec<LossRepair>,
    /// Time between the answers.
    pub time: Duration,
}

/// Draws the screen.
pub fn draw(frame: &mut Frame<'_>, view: &View) {
    let verdict = verdict(view);
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(4),
        Constraint::Length(6),
        Constraint::Min(0),
    ])
    .split(frame.area());
    frame.render_widget(title(view), areas[0]);
    frame.render_widget(verdict, areas[1]);
    throughput(frame, view, areas[2]);
    tables(frame, &all_tables(view), areas[3]);
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn dim() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

fn title(view: &View) -> Line<'static> {
    let map = &view.now.map;
    let inner = printable(map.inner.as_deref().unwrap_or("a tunnel"));
    let program = match &map.program {
        Some(program) => format!(", {} ({})", printable(&program.name), program.pid),
        None => String::new(),
    };
    let state = if view.is_paused {
        "paused: space resumes".to_owned()
    } else {
        format!("every {} s, space pauses", view.every.as_secs())
    };
    Line::from(vec![
        Span::styled("seikan top  ", bold()),
        Span::styled(format!("{inner}{program}"), bold()),
        Span::styled(format!("  {state}, q quits"), dim()),
    ])
}

/// Two lines for the sentence, one for name and confidence, one for the first value.
fn verdict(view: &View) -> Paragraph<'static> {
    let verdict = &view.verdict;
    let colour = match verdict.cause.spec().severity {
        Severity::Healthy => Color::Green,
        Severity::Notice | Severity::Warning => Color::Yellow,
        Severity::Fault => Color::Red,
    };
    let level = match (verdict.cause, verdict.level) {
        (cause, _) if !cause.is_fault() => "",
        (_, Level::Consistent) => ", possible",
        (_, _) => ", likely",
    };
    let fact = verdict.evidence.first().map(|fact| {
        let value = rounded(fact.value);
        let text = format!("{}: {value} (normal: {})", fact.name, fact.expected);
        Line::styled(printable(&text), dim())
    });
    let mut lines = vec![
        Line::styled(printable(&verdict.sentence), Style::new().fg(colour)),
        Line::styled(format!("{}{level}", verdict.cause), bold().fg(colour)),
    ];
    lines.extend(fact);
    Paragraph::new(lines).wrap(Wrap { trim: true })
}

fn throughput(frame: &mut Frame<'_>, view: &View, area: Rect) {
    let halves = Layout::horizontal([Constraint::Fill(1); 2]).split(area);
    let newest = view.history.last().copied().unwrap_or_default();
    let out: Vec<f64> = view.history.iter().map(|both| both.0).collect();
    let into: Vec<f64> = view.history.iter().map(|both| both.1).collect();
    for (area, name, values, rate) in [
        (halves[0], "out", out, newest.0),
        (halves[1], "in", into, newest.1),
    ] {
        let most = values.iter().copied().fold(0.0, f64::max);
        let megabits = |bits: f64| rounded(bits / 1e6);
        let heading = format!(
            " {name} {} Mbit/s, maximum {} ",
            megabits(rate),
            megabits(most)
        );
        // The newest is at the right.
        let available = usize::from(area.width.saturating_sub(2));
        let newest = values.len().saturating_sub(available);
        let bars = values[newest..].iter().map(|bits| (bits / 1e3) as u64);
        let empty = std::iter::repeat_n(0, available.saturating_sub(values.len()));
        let bars: Vec<u64> = empty.chain(bars).collect();
        let picture = Sparkline::default()
            .block(Block::new().borders(Borders::ALL).title(heading))
            .style(Style::new().fg(Color::Cyan))
            .max(((most / 1e3) as u64).max(1))
            .data(&bars);
        frame.render_widget(picture, area);
    }
}

/// Content of a table.
struct TableContent {
    heading: &'static str,
    columns: &'static [&'static str],
    rows: Vec<Vec<String>>,
}

impl TableContent {
    fn height(&self) -> u16 {
        self.rows.len().min(ROWS) as u16 + 1
    }
}

fn table(
    heading: &'static str,
    columns: &'static [&'static str],
    rows: impl Iterator<Item = Vec<String>>,
) -> TableContent {
    TableContent {
        heading,
        columns,
        rows: rows.collect(),
    }
}

/// Returns the tables with rows, the most relevant first.
fn all_tables(view: &View) -> Vec<TableContent> {
    let now = &view.now;
    let mut all = vec![
        drops(now),
        loss_repair(view),
        interfaces(now),
        threads(now),
        processors(now),
        connections(now),
        sockets(now),
    ];
    all.retain(|content| !content.rows.is_empty());
    all
}

fn tables(frame: &mut Frame<'_>, all: &[TableContent], area: Rect) {
    let columns: Vec<Rect> = if area.width >= WIDE {
        Layout::horizontal([Constraint::Fill(1); 2])
            .spacing(2)
            .split(area)
            .to_vec()
    } else {
        vec![area]
    };
    let mut used = vec![0; columns.len()];
    for content in all {
        let free = |column: usize| area.height.saturating_sub(used[column]);
        // The column with more free rows takes the next table.
        let Some(column) =
            (0..columns.len()).max_by_key(|column| (free(*column), Reverse(*column)))
        else {
            return;
        };
        // A heading without rows is useless.
        let height = content.height().min(free(column));
        if height < 2 {
            continue;
        }
        let target = Rect {
            y: area.y + used[column],
            height,
            ..columns[column]
        };
        draw_table(frame, content, target);
        used[column] += height + 1;
    }
}

fn draw_table(frame: &mut Frame<'_>, content: &TableContent, area: Rect) {
    let head = std::iter::once(content.heading).chain(content.columns.iter().copied());
    let right = |text: &str| ratatui::text::Text::from(text.to_owned()).right_aligned();
    let head = head.enumerate().map(|(i, text)| match i {
        0 => Cell::from(text),
        _ => Cell::from(right(text)),
    });
    let rows = content.rows.iter().take(ROWS).map(|row| {
        Row::new(row.iter().enumerate().map(|(i, text)| match i {
            0 => Cell::from(printable(text)),
            _ => Cell::from(right(text)),
        }))
    });
    let widths = std::iter::once(Constraint::Fill(1)).chain(
        content
            .columns
            .iter()
            .map(|name| Constraint::Length((name.len() as u16).max(8))),
    );
    let table = Table::new(rows, widths).header(Row::new(head).style(bold().fg(Color::Cyan)));
    frame.render_widget(table, area);
}

/// Returns a rate as text; empty for zero.
fn rate(value: Option<f64>, now: &Evidence) -> String {
    match value.map(|value| value / now.seconds()) {
        Some(rate) if rate > 0.0 => rounded(rate),
        _ => String::new(),
    }
}

fn drops(now: &Evidence) -> TableContent {
    let growing = now.series.columns.iter().filter_map(|(key, column)| {
        let lost = column.growth();
        let name = match &key.subject {
            Subject::Host => {
                let reason = key.name.strip_prefix(metric::DROP_PREFIX)?;
                format!("machine: {reason}")
            }
            Subject::Link(link)
                if matches!(&*key.name, metric::RX_DROPPED | metric::TX_DROPPED) =>
            {
                format!("{link}: {}", key.name)
            }
            Subject::Qdisc(link) if key.name == metric::QDISC_DROPS => {
                format!("queue of {link}")
            }
            Subject::Udp(_) if key.name == metric::UDP_DROPS => "receive buffer of a socket".into(),
            Subject::Cpu(cpu) if key.name == metric::SOFTNET_DROPPED => {
                format!("machine: backlog of processor {cpu}")
            }
            _ => return None,
        };
        (lost > 0).then_some((name, lost))
    });
    let mut growing: Vec<(String, u64)> = growing.collect();
    growing.sort_by_key(|(_, lost)| Reverse(*lost));
    let rows = growing.into_iter();
    let rows = rows.map(|(name, lost)| vec![name, rate(Some(lost as f64), now)]);
    table("dropped", &["per s"], rows)
}

fn loss_repair(view: &View) -> TableContent {
    let row = |repair: &LossRepair| {
        let seconds = view.repairs.time.as_secs_f64().max(0.1);
        let per_second = |count: u64| rounded(count as f64 / seconds);
        vec![
            repair.peer.clone(),
            rounded(100.0 * repair.loss),
            per_second(repair.restored),
            per_second(repair.not_restored),
        ]
    };
    table(
        "lost on the path to",
        &["%", "restored/s", "not restored/s"],
        view.repairs.found.iter().map(row),
    )
}

fn interfaces(now: &Evidence) -> TableContent {
    let rows = now.map.links.iter().map(|link| {
        let grown = |name| now.link(&link.name, name);
        let megabits = |name| match grown(name) {
            Some(bytes) if bytes > 0.0 => rounded(bytes * 8.0 / now.seconds() / 1e6),
            _ => String::new(),
        };
        let queued = now
            .column(&Subject::Qdisc(link.name.clone()), metric::QDISC_LENGTH)
            .map(|column| column.mean())
            .filter(|mean| *mean > 0.0);
        vec![
            link.name.clone(),
            megabits(metric::TX_BYTES),
            megabits(metric::RX_BYTES),
            rate(grown(metric::TX_PACKETS), now),
            rate(grown(metric::RX_PACKETS), now),
            queued.map(rounded).unwrap_or_default(),
        ]
    });
    table(
        "interface",
        &["out Mb/s", "in Mb/s", "out pkt/s", "in pkt/s", "queued"],
        rows,
    )
}

fn percent(share: f64) -> String {
    match share {
        share if share < 0.0005 => String::new(),
        share => format!("{:.1} %", share * 100.0),
    }
}

fn threads(now: &Evidence) -> TableContent {
    let mut threads = now.threads();
    threads.sort_by(|a, b| (b.running + b.waiting).total_cmp(&(a.running + a.waiting)));
    let rows = threads.iter().map(|thread| {
        vec![
            format!("{} {}", thread.name, thread.tid),
            percent(thread.running),
            percent(thread.waiting),
            rounded(thread.sleeps),
            rounded(thread.preempted),
        ]
    });
    table(
        "thread",
        &["running", "waiting", "sleeps/s", "preempted/s"],
        rows,
    )
}

fn processors(now: &Evidence) -> TableContent {
    let rows = now.map.host.cpus.iter().filter_map(|cpu| {
        let share = |state| now.cpu_share(*cpu, &[state]);
        let cell = |state| percent(share(state).unwrap_or(0.0));
        let busy = 1.0 - share(metric::IDLE_NS)?;
        Some(vec![
            format!("processor {cpu}"),
            percent(busy),
            cell(metric::USER_NS),
            cell(metric::SYSTEM_NS),
            cell(metric::SOFTIRQ_NS),
            cell(metric::STEAL_NS),
        ])
    });
    table(
        "processor",
        &["busy", "user", "system", "softirq", "stolen"],
        rows,
    )
}

fn connections(now: &Evidence) -> TableContent {
    let mut flows: Vec<_> = now.map.flows.iter().collect();
    let sent = |inode| {
        now.growth(&Subject::Tcp(inode), metric::TCP_BYTES_ACKED)
            .unwrap_or(0.0)
    };
    flows.sort_by(|a, b| sent(b.inode).total_cmp(&sent(a.inode)));
    let rows = flows.into_iter().filter_map(|flow| {
        let gauge = |name| now.tcp_mean(flow, name);
        // The connection is closed, or has not been measured lately.
        let rtt = gauge(metric::TCP_RTT_US)?;
        let far = flow.remote.map(|remote| remote.to_string());
        Some(vec![
            far.unwrap_or_default(),
            rounded(sent(flow.inode) * 8.0 / now.seconds() / 1e6),
            rounded(rtt / 1e3),
            gauge(metric::TCP_CWND).map(rounded).unwrap_or_default(),
            rate(now.tcp(flow, metric::TCP_RETRANS), now),
        ])
    });
    table("TCP to", &["Mbit/s", "RTT ms", "cwnd", "retrans/s"], rows)
}

fn sockets(now: &Evidence) -> TableContent {
    let sockets = now.map.sockets.iter();
    let rows = sockets
        .filter(|socket| socket.transport == Transport::Udp)
        .map(|socket| {
            let subject = Subject::Udp(socket.inode);
            let queued = |name| match now.column(&subject, name).map(|column| column.max()) {
                Some(bytes) if bytes > 0 => number(bytes / 1024),
                _ => String::new(),
            };
            vec![
                format!("UDP {}", socket.local),
                queued(metric::UDP_RX_QUEUE),
                queued(metric::UDP_TX_QUEUE),
                rate(now.growth(&subject, metric::UDP_DROPS), now),
            ]
        });
    table(
        "socket of the tunnel",
        &["in, KiB", "out, KiB", "lost/s"],
        rows,
    )
}

#[cfg(test)]
mod tests;
