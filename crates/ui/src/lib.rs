//! User interface of the command line programs: colours, tables, numbers, progress bars, pictures, Ctrl-C.
//!
//! [`screen`] formats text for a terminal, [`svg`] and [`axis`] draw pictures in the colours of [`palette`],
//! [`ProgressBar`] shows a long run on standard error and [`Interrupt`] ends it.
#![forbid(unsafe_code)]

pub mod axis;
pub mod generate;
mod interrupt;
pub mod output;
pub mod palette;
mod progress;
pub mod screen;
pub mod svg;
pub mod time;

pub use interrupt::{Interrupt, Interrupted, SignalError, SignalGuard, Stop};
pub use progress::{Progress, ProgressBar};

/// Style sheet of HTML pages.
pub const PAGE_STYLE: &str = include_str!("page.css");
