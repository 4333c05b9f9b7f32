//! Values of command line options.

use std::ops::RangeBounds;

use clap::builder::RangedI64ValueParser;
use clap::{Args, Command, ValueEnum};

/// Parses a whole number of seconds, 1 to `MAX`.
pub(crate) fn seconds<const MAX: u32>(text: &str) -> Result<f64, String> {
    let seconds: u32 = text.parse().map_err(|_| "not a whole number".to_owned())?;
    if (1..=MAX).contains(&seconds) {
        Ok(f64::from(seconds))
    } else {
        Err(format!(
            "{seconds} seconds are out of range: use 1 to {MAX}"
        ))
    }
}

/// Parses a whole number in this range.
pub fn whole(range: impl RangeBounds<i64>) -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(range)
}

/// Returns the name of a value, as options spell it.
pub(crate) fn name(value: &impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Returns options of which none is given.
pub(crate) fn defaults<T: Args>() -> T {
    let matches = T::augment_args(Command::new("")).get_matches_from([""]);
    T::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}
