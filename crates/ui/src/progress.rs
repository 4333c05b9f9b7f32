//! A progress bar on standard error: on a terminal only, gone when dropped.

use std::time::Duration;

/// One step of a long run, for a progress bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Work done so far, 0 to 1.
    pub fraction: f64,
    /// A few words that name the next step.
    pub step: String,
}

/// The bar. Off a terminal it does nothing.
#[derive(Debug)]
pub struct ProgressBar(indicatif::ProgressBar);

impl ProgressBar {
    const STEPS: u64 = 1000;

    /// Creates a bar at zero, and starts a thread that redraws it.
    #[must_use]
    pub fn new() -> Self {
        // Standard error that is not a terminal is hidden by the library.
        let bar = indicatif::ProgressBar::new(Self::STEPS);
        if let Ok(style) = indicatif::ProgressStyle::with_template(
            "{spinner} {bar:30.cyan/dim} {elapsed:>4}  {msg}",
        ) {
            bar.set_style(style.progress_chars("━╸─"));
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }

    /// Shows a step.
    pub fn show(&self, progress: Progress) {
        self.0
            .set_position((progress.fraction.clamp(0.0, 1.0) * Self::STEPS as f64) as u64);
        self.0.set_message(progress.step);
    }
}

impl Default for ProgressBar {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for ProgressBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
