//! Converts the texts of sections to values: a [`Draft`], in which nothing is required yet.
//!
//! Faults of single values are reported here; `check` reports faults of the whole.

use std::path::Path;

use ipnet::IpNet;

use super::report::Reporter;
use super::schema::{Form, Section, SectionKind, Site};
use super::sections::{At, Device, Gateway, Interface, Key, Peer, Remote};
use super::source::ReadKey;
use super::values::{self, Problem};

/// A configuration that may be incomplete.
#[derive(Default)]
pub(super) struct Draft {
    pub interface: Interface,
    pub peers: Vec<Peer>,
    pub gateway: Gateway,
    pub devices: Vec<Device>,
    pub remotes: Vec<Remote>,
}

/// Converts every value.
pub(super) fn read(
    sections: Vec<Section>,
    read_key: &ReadKey<'_>,
    reporter: &mut Reporter<'_>,
) -> Draft {
    let mut draft = Draft::default();
    for section in sections {
        let site = Site::line(section.line);
        match section.kind {
            SectionKind::Interface => {
                if draft.interface.site.line != 0 {
                    reporter.warn(
                        site,
                        "a second [Interface] section",
                        "put the keys of both into one section",
                    );
                }
                draft.interface = draft.interface.read(section, reporter);
            }
            SectionKind::Peer => draft.peers.push(Peer::default().read(section, reporter)),
            SectionKind::Gateway => {
                let first = draft.gateway.site.line;
                if first != 0 {
                    let header = section.kind.header(reporter.syntax);
                    reporter.error(
                        site,
                        format!("a second {header} section, the first is in line {first}"),
                        "a tunnel has one gateway: put the keys of both into one section",
                    );
                }
                draft.gateway = draft.gateway.read(section, reporter);
            }
            SectionKind::Device => {
                warn_of_host_bits(&section, reporter);
                draft
                    .devices
                    .push(Device::default().read(section, reporter));
            }
            SectionKind::Remote => draft
                .remotes
                .push(Remote::default().read(section, reporter)),
        }
    }
    let mut keys = KeyFiles { read_key, reporter };
    let interface = &mut draft.interface;
    let file = &interface.private_key_file;
    keys.read(&mut interface.private_key, file, values::private_key);
    for peer in &mut draft.peers {
        let file = &peer.preshared_key_file;
        keys.read(&mut peer.preshared_key, file, values::preshared_key);
    }
    draft
}

/// Warns of a rule that allows a whole network although it names one host.
fn warn_of_host_bits(section: &Section, reporter: &mut Reporter<'_>) {
    let rules = section
        .entries
        .iter()
        .filter(|entry| entry.key.form == Form::Rules);
    for (key, item) in rules.flat_map(|entry| entry.items.iter().map(|item| (entry.key, item))) {
        let source = item.text.split_whitespace().next();
        if let Some(Ok(source)) = source.map(str::parse::<IpNet>) {
            reporter.truncate_prefix(key.at(item.line), source);
        }
    }
}

/// Reads keys from the files that other keys name.
struct KeyFiles<'a, 'r, 's> {
    read_key: &'a ReadKey<'a>,
    reporter: &'r mut Reporter<'s>,
}

impl KeyFiles<'_, '_, '_> {
    /// Adds the content of the file to the values of the key; reports both being given.
    fn read<T>(
        &mut self,
        key: &mut Key<T>,
        file: &Key<String>,
        parse: fn(&str) -> Result<T, Problem>,
    ) {
        if key.is_given() && file.is_given() {
            let (last, other) = if key.line > file.line {
                (key.spec.at(key.line), file.spec)
            } else {
                (file.spec.at(file.line), key.spec)
            };
            self.reporter.error(
                last,
                format!("and `{}` are both given", self.reporter.name(other)),
                "keep one of them",
            );
        }
        let Some(At { value: path, site }) = file.last() else {
            return;
        };
        match (self.read_key)(Path::new(path)).map(|text| parse(text.trim())) {
            Ok(Ok(value)) => key.values.push(At { value, site: *site }),
            Ok(Err(Problem { message, help })) => {
                self.reporter.error(
                    *site,
                    format!("names `{path}`, whose content {message}"),
                    help,
                );
            }
            Err(error) => {
                let help = "write the path of a file with one key, from the root or from this file's folder";
                self.reporter
                    .error(*site, format!("names `{path}`: {error}"), help);
            }
        }
    }
}
