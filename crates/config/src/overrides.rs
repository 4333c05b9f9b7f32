//! Values of the command line and the environment that override those of the file.
//!
//! Precedence: command line > environment > file > default. Each layer is an [`Overrides`];
//! [`Overrides::over`] combines two.

use std::net::SocketAddr;

use super::diagnostic::{Diagnostic, Diagnostics, Severity};
use super::types::Protocol;
use super::values::{self, Problem};

/// Values that replace those of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overrides {
    /// The wire protocol.
    pub protocol: Option<Protocol>,
    /// Whether to use offloads.
    pub offload: Option<bool>,
    /// Address of the metrics server.
    pub metrics: Option<SocketAddr>,
    /// Inner MTU in bytes.
    pub mtu: Option<u32>,
}

impl Overrides {
    /// Reads `SEIKAN_PROTOCOL`, `SEIKAN_OFFLOAD`, `SEIKAN_METRICS` and `SEIKAN_MTU`; reports all
    /// faults. An empty variable counts as unset.
    pub fn from_env() -> Result<Self, Diagnostics> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// As [`Overrides::from_env`], from any source of variables.
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Self, Diagnostics> {
        let mut faults = Diagnostics::default();
        let this = Self {
            protocol: variable("SEIKAN_PROTOCOL", &get, values::protocol, &mut faults),
            offload: variable("SEIKAN_OFFLOAD", &get, values::boolean, &mut faults),
            metrics: variable("SEIKAN_METRICS", &get, values::socket, &mut faults),
            mtu: variable("SEIKAN_MTU", &get, values::mtu, &mut faults),
        };
        if faults.is_empty() {
            Ok(this)
        } else {
            Err(faults)
        }
    }

    /// Returns these values, and those of `lower` where they are unset.
    pub fn over(self, lower: Self) -> Self {
        Self {
            protocol: self.protocol.or(lower.protocol),
            offload: self.offload.or(lower.offload),
            metrics: self.metrics.or(lower.metrics),
            mtu: self.mtu.or(lower.mtu),
        }
    }
}

/// Reads one variable; adds a diagnostic if its value is invalid.
fn variable<T>(
    name: &str,
    get: &impl Fn(&str) -> Option<String>,
    parse: fn(&str) -> Result<T, Problem>,
    faults: &mut Diagnostics,
) -> Option<T> {
    let text = get(name).filter(|text| !text.is_empty())?;
    match parse(text.trim()) {
        Ok(value) => Some(value),
        Err(problem) => {
            let message = format!("`{name}` {}", problem.message);
            faults.push(
                Diagnostic::new(Severity::Error, "environment", message).with_help(problem.help),
            );
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_higher_layer_wins_and_the_lower_fills_in() {
        let cli = Overrides {
            mtu: Some(1400),
            ..Overrides::default()
        };
        let env = Overrides {
            mtu: Some(9000),
            offload: Some(false),
            ..Overrides::default()
        };
        let both = cli.over(env);
        assert_eq!((both.mtu, both.offload), (Some(1400), Some(false)));
    }

    #[test]
    fn every_faulty_variable_is_named() {
        let faults = Overrides::from_vars(|name| match name {
            "SEIKAN_MTU" => Some("big".into()),
            "SEIKAN_PROTOCOL" => Some("ipsec".into()),
            "SEIKAN_OFFLOAD" => Some("".into()),
            _ => None,
        })
        .unwrap_err();
        let text = faults.render(false);
        assert!(
            text.contains("`SEIKAN_MTU` is `big`, not a number of bytes"),
            "{text}"
        );
        assert!(text.contains("`SEIKAN_PROTOCOL` is `ipsec`"), "{text}");
        assert_eq!(faults.iter().count(), 2);
    }
}
