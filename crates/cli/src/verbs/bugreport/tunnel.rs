//! Parts about a tunnel, running or not.
//!
//! A compromised daemon must not lead root to files that the daemon itself cannot read. So a
//! configuration that it names is only read if it is named as the interface, and if nobody but root
//! can change the file. [`log`] says how the log is read.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, anyhow};
use seikan_config::{InterfaceName, Overrides, Syntax, interface_name};
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::nft;
use seikan_node::status::Status;
use seikan_observe::path::PathMap;
use seikan_sys::discover::{self, Subject};
use seikan_sys::owner;
use seikan_ui::Interrupt;

use super::archive::{Content, Report};
use super::{log, output_of};
use crate::screen::{joined, plain};
use crate::verbs::doctor::text::Page;
use crate::verbs::doctor::{drawing, measure};
use crate::verbs::netcheck;

/// Duration of the recording, in seconds.
const RECORDED: u64 = 5;

/// A tunnel to report on.
pub struct Tunnel {
    name: InterfaceName,
    /// Its configuration file or interface, as given.
    target: String,
}

impl Tunnel {
    /// Returns the tunnel of an interface or a configuration file.
    ///
    /// # Errors
    /// It cannot be the name of an interface.
    pub fn named(target: &str) -> anyhow::Result<Tunnel> {
        Ok(Tunnel {
            name: interface_name(target)?,
            target: target.to_owned(),
        })
    }

    /// Returns the name of its interface.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Adds the parts.
    pub fn collect(&self, dirs: &RuntimeDirs, interrupt: &Interrupt, report: &mut Report) {
        let name = self.name.as_str();
        let status = ask::status(dirs, name);
        let hooks_are_known = self.add_configuration(status.as_ref().ok(), report);
        match &status {
            Ok(status) => self.add_status(status, dirs, report),
            Err(error) => {
                let names = self.parts(&["status.json", "metrics.txt"]);
                report.miss(names, &anyhow!("{error}"));
            }
        }
        let log = if hooks_are_known {
            log::last_lines_of(dirs, name).map(Content::Log)
        } else {
            Err(anyhow!(
                "it may quote commands of hooks, which are only found if the configuration can be used: add lines by hand"
            ))
        };
        report.add(self.part("log.txt"), "last lines of the log", log);
        let firewall = firewall(name).map(Content::Text);
        report.add(
            self.part("firewall.txt"),
            "firewall rules of the tunnel",
            firewall,
        );
        match discover::path(&Subject::Interface(name.to_owned())) {
            Ok(map) => self.add_path(map, interrupt, report),
            Err(error) => {
                let names = self.parts(&["path.txt", "path.json", "recording.parquet"]);
                report.miss(names, &error.into());
            }
        }
    }

    /// Adds the configuration as it was parsed, without secrets. Its text is never copied: comments
    /// may have secrets too. Returns whether the report learned all commands of hooks.
    fn add_configuration(&self, status: Option<&Status>, report: &mut Report) -> bool {
        let of_daemon = status.and_then(|status| status.interface.config.as_deref());
        let is_named_by_user = self.target != self.name.as_str();
        // A link in /etc may lead to a file of another name.
        let given = seikan_config::locate(&self.target).ok();
        let is_given = |file: &Path| {
            let [file, given] =
                [Some(file), given.as_deref()].map(|file| file?.canonicalize().ok());
            file.is_some() && file == given
        };
        let of_daemon = of_daemon.filter(|file| !is_given(file));
        let target = match of_daemon.map(|file| self.checked(file)) {
            Some(Ok(file)) => file,
            Some(Err(error)) if !is_named_by_user => {
                let help = "if the file is the right one, name it: `seikan bugreport FILE`";
                report.miss(self.part("config.toml"), &anyhow!("{error:#}; {help}"));
                return false;
            }
            _ => self.target.clone(),
        };
        let parsed = seikan_config::load(&target, &Overrides::default());
        for text in &parsed.unreportable {
            report.secrets.learn(text, self.name.as_str());
        }
        let syntax = parsed.path.as_deref().map_or(Syntax::Toml, Syntax::of);
        let name = match syntax {
            Syntax::Ini => "config.conf",
            Syntax::Toml => "config.toml",
        };
        let config = parsed.config.as_ref().map(|config| {
            let text = config.to_redacted(syntax);
            Content::Text(text)
        });
        let config = config.context("it cannot be used; check.json has the reasons");
        report.add(
            self.part(name),
            "configuration as the program reads it, without secrets, commands and comments",
            config,
        );
        if !parsed.diagnostics.is_empty() {
            let json = serde_json::to_string_pretty(&parsed.diagnostics);
            let json = json.map(|json| Content::Log(json + "\n"));
            report.add(
                self.part("check.json"),
                "errors, warnings and notes of `seikan check`",
                json.map_err(Into::into),
            );
        }
        parsed.config.is_some()
    }

    /// Returns the configuration file that the daemon names, without links, if it may be this tunnel's.
    fn checked(&self, file: &Path) -> anyhow::Result<String> {
        let failed = || format!("cannot use {}, which the tunnel names", file.display());
        let file = file.canonicalize().with_context(failed)?;
        let name = file.to_str().unwrap_or_default();
        if interface_name(name).as_ref() != Ok(&self.name) || !file.is_file() {
            return Err(anyhow!("it is no file of that name").context(failed()));
        }
        owner::check_only_root_changes(&file).with_context(failed)?;
        Ok(name.to_owned())
    }

    fn add_status(&self, status: &Status, dirs: &RuntimeDirs, report: &mut Report) {
        let name = self.name.as_str();
        report.add(
            self.part("status.json"),
            "output of `seikan status --json`",
            Content::json(status),
        );
        let metrics = ask::metrics(dirs, name).map(Content::Text);
        report.add(
            self.part("metrics.txt"),
            "metrics, in the OpenMetrics text format",
            metrics.map_err(Into::into),
        );
        if let Some(mesh) = &status.mesh {
            let text = plain(&netcheck::render(name, mesh));
            report.add(
                self.part("netcheck.txt"),
                "output of `seikan netcheck`",
                Ok(Content::Text(text)),
            );
        }
    }

    fn add_path(&self, map: PathMap, interrupt: &Interrupt, report: &mut Report) {
        let page = Page {
            width: 80,
            unicode: true,
        };
        let drawn = plain(&drawing::draw(&map, None, &page));
        report.add(
            self.part("path.txt"),
            "path of packets on this host, as of `seikan doctor --map`",
            Ok(Content::Text(drawn)),
        );
        report.add(
            self.part("path.json"),
            "the same with all facts",
            Content::json(&map),
        );
        report.add(
            self.part("recording.parquet"),
            "measurement of 5 s, for `seikan doctor --from`",
            record(map, interrupt),
        );
    }

    fn part(&self, name: &str) -> String {
        format!("{}/{name}", self.name)
    }

    fn parts(&self, names: &[&str]) -> String {
        joined(names.iter().map(|name| self.part(name)), ", ")
    }
}

/// Returns the rules in the tunnel's own nftables tables: one for its default route, and one for a
/// gateway.
fn firewall(name: &str) -> anyhow::Result<String> {
    let mut rules = String::new();
    for table in [nft::tunnel_table(name), nft::gateway_table(name)] {
        let mut command = Command::new("nft");
        match output_of(command.args(["list", "table", "inet", &table])) {
            Ok(text) => rules += &text,
            Err(error) if error.to_string().contains("No such file") => {
                rules += &format!("no table {table}\n");
            }
            Err(error) => return Err(error.context(format!("cannot list the table {table}"))),
        }
    }
    Ok(rules)
}

fn record(map: PathMap, interrupt: &Interrupt) -> anyhow::Result<Content> {
    interrupt.check()?;
    let options = measure::Options {
        length: Duration::from_secs(RECORDED),
        interval: Duration::from_millis(100),
        probe: true,
        expected: None,
        level: 2,
        stacks: false,
    };
    let recording = measure::whole(map, &options, interrupt)?;
    let mut bytes = Vec::new();
    recording.write(&mut bytes)?;
    // Names of values are made of these, too.
    let text = serde_json::to_string(&(&recording.evidence.map, &recording.functions))?;
    Ok(Content::Binary { bytes, text })
}
