//! Converts sections of texts to a [`Draft`]: values have types, and nothing is required yet.
//!
//! Faults of single values are reported here; `check` reports faults of the whole.

use std::path::Path;

use ipnet::IpNet;
use seikan_proto::gateway::rules::Rule;
use zeroize::Zeroizing;

use super::draft::{
    At, DeviceDraft, Draft, GatewaySection, Given, InterfaceDraft, PeerDraft, RemoteDraft,
};
use super::report::Reporter;
use super::schema::{Document, Entry, Field, Item, Section, SectionKind, Shape};
use super::source::ReadKey;
use super::values::{self, Problem};

/// Converts every value.
pub(super) fn interpret(
    document: Document,
    read_key: &ReadKey<'_>,
    reporter: &mut Reporter<'_>,
) -> Draft {
    let mut context = Context { read_key, reporter };
    let mut draft = Draft::default();
    for section in document.sections {
        match section.kind {
            SectionKind::Interface => {
                if draft.interface.line.is_some() {
                    let message = "a second [Interface] section";
                    let help = "put the keys of both into one section";
                    context.reporter.warn(section.line, message, help);
                }
                draft.interface.line.get_or_insert(section.line);
                context.interface(section, &mut draft.interface);
            }
            SectionKind::Peer => {
                draft.peers.push(context.peer(section));
            }
            SectionKind::Gateway => {
                let first = draft.gateway.section.take();
                if let Some(first) = &first {
                    let header = section.kind.header(context.reporter.syntax);
                    let message = format!(
                        "a second {} section, the first is in line {}",
                        header.unwrap_or_default(),
                        first.line
                    );
                    let help = "a tunnel has one gateway: put the keys of both into one section";
                    context.reporter.error(section.line, &message, help);
                }
                let mut gateway = first.unwrap_or_else(|| GatewaySection::new(section.line));
                context.gateway(section, &mut gateway);
                draft.gateway.section = Some(gateway);
            }
            SectionKind::Device => {
                draft.gateway.devices.push(context.device(section));
            }
            SectionKind::Remote => {
                draft.gateway.remotes.push(context.remote(section));
            }
        }
    }
    draft
}

/// Context for reading a section.
struct Context<'a, 'r, 's> {
    read_key: &'a ReadKey<'a>,
    reporter: &'r mut Reporter<'s>,
}

impl Context<'_, '_, '_> {
    fn interface(&mut self, section: Section, draft: &mut InterfaceDraft) {
        for entry in section.entries {
            self.note_repetition(&entry, &mut draft.given);
            match entry.key {
                Field::PrivateKey | Field::PrivateKeyFile => {
                    self.note_two_sources(entry.key, entry.line, &draft.given);
                    draft.private_key = self
                        .key(&entry, values::private_key)
                        .or(draft.private_key.take());
                }
                Field::ListenPort => self.set(&entry, values::port, &mut draft.listen_port),
                Field::Address => {
                    draft.addresses.extend(self.all(&entry, values::prefix));
                }
                Field::Mtu => self.set_at(&entry, values::mtu, &mut draft.mtu),
                Field::Dns => {
                    let items = self.all(&entry, values::dns).into_iter();
                    draft.dns.extend(items.map(|item| item.value));
                }
                Field::Table => self.set(&entry, values::table, &mut draft.table),
                Field::FwMark => self.set_option(&entry, values::fwmark, &mut draft.fwmark),
                Field::PreUp => draft.hooks.pre_up.extend(texts(&entry)),
                Field::PostUp => draft.hooks.post_up.extend(texts(&entry)),
                Field::PreDown => draft.hooks.pre_down.extend(texts(&entry)),
                Field::PostDown => draft.hooks.post_down.extend(texts(&entry)),
                Field::SaveConfig => self.set(&entry, values::boolean, &mut draft.save_config),
                Field::Protocol => {
                    self.set(&entry, values::protocol, &mut draft.native.protocol);
                }
                Field::Mode => self.set_at(&entry, values::mode, &mut draft.native.mode),
                Field::Offload => self.set(&entry, values::boolean, &mut draft.native.offload),
                Field::Metrics => self.set_at(&entry, values::socket, &mut draft.native.metrics),
                Field::Cipher => self.set_at(&entry, values::cipher, &mut draft.native.cipher),
                Field::CopyDscp => self.set(&entry, values::boolean, &mut draft.native.copy_dscp),
                Field::Repair => self.set_at(&entry, values::repair, &mut draft.native.repair),
                Field::Coordinator => {
                    self.set_at(&entry, values::coordinator, &mut draft.mesh.coordinator);
                }
                Field::CoordinatorPin => self.set_at(&entry, values::pin, &mut draft.mesh.pin),
                Field::Credential => {
                    self.set_at(&entry, values::credential, &mut draft.mesh.credential);
                }
                Field::Stun => draft.mesh.stun.extend(self.all(&entry, values::endpoint)),
                Field::Names => self.set(&entry, values::boolean, &mut draft.mesh.names),
                Field::PortMapping => {
                    self.set(&entry, values::boolean, &mut draft.mesh.port_mapping);
                }
                Field::Pins => draft.mesh.pins.extend(self.all(&entry, values::member_pin)),
                Field::PinFirstUse => {
                    self.set(&entry, values::boolean, &mut draft.mesh.first_use);
                }
                // The splitters pass only keys that belong to the section.
                _ => {}
            }
        }
    }

    fn peer(&mut self, section: Section) -> PeerDraft {
        let mut draft = PeerDraft {
            line: section.line,
            ..PeerDraft::default()
        };
        for entry in section.entries {
            self.note_repetition(&entry, &mut draft.given);
            match entry.key {
                Field::Name => self.set(&entry, values::name, &mut draft.name),
                Field::PublicKey => {
                    self.set_at(&entry, values::public_key, &mut draft.public_key);
                }
                Field::PresharedKey | Field::PresharedKeyFile => {
                    self.note_two_sources(entry.key, entry.line, &draft.given);
                    if let Some(key) = self.key(&entry, values::preshared_key) {
                        draft.preshared_key = key.value;
                    }
                }
                Field::AllowedIps => {
                    draft.allowed_ips.extend(self.all(&entry, values::prefix));
                }
                Field::Endpoint => self.set(&entry, values::endpoint, &mut draft.endpoint),
                Field::PersistentKeepalive => {
                    self.set_option(&entry, values::keepalive, &mut draft.persistent_keepalive)
                }
                // The splitters pass only keys that belong to the section.
                _ => {}
            }
        }
        draft
    }

    fn gateway(&mut self, section: Section, draft: &mut GatewaySection) {
        for entry in section.entries {
            self.note_repetition(&entry, &mut draft.given);
            match entry.key {
                Field::GatewayInterface => {
                    self.set_at(&entry, values::interface, &mut draft.interface);
                }
                Field::GatewayMode => self.set(&entry, values::gateway_mode, &mut draft.mode),
                Field::AnswerFor => {
                    draft.answer_for.extend(self.all(&entry, values::prefix));
                }
                Field::ProxyArp => self.set_at(&entry, values::boolean, &mut draft.proxy_arp),
                Field::Priority => self.set_at(&entry, values::priority, &mut draft.priority),
                // The splitters pass only keys that belong to the section.
                _ => {}
            }
        }
    }

    fn device(&mut self, section: Section) -> DeviceDraft {
        let mut draft = DeviceDraft {
            line: section.line,
            ..DeviceDraft::default()
        };
        for entry in section.entries {
            self.note_repetition(&entry, &mut draft.given);
            match entry.key {
                Field::DeviceName => self.set_at(&entry, values::device_name, &mut draft.name),
                Field::DeviceMac => self.set_at(&entry, values::mac, &mut draft.mac),
                Field::DeviceVlan => self.set_at(&entry, values::vlan, &mut draft.vlan),
                Field::DeviceLan => draft.lan.extend(self.all(&entry, values::host_address)),
                Field::DeviceOverlay => {
                    draft.overlay.extend(self.all(&entry, values::host_address));
                }
                Field::AllowFrom => draft.allow_from.extend(self.rules(&entry)),
                Field::AllowTo => draft.allow_to.extend(self.rules(&entry)),
                // The splitters pass only keys that belong to the section.
                _ => {}
            }
        }
        draft
    }

    fn remote(&mut self, section: Section) -> RemoteDraft {
        let mut draft = RemoteDraft {
            line: section.line,
            ..RemoteDraft::default()
        };
        for entry in section.entries {
            self.note_repetition(&entry, &mut draft.given);
            match entry.key {
                Field::RemoteOverlay => {
                    self.set_at(&entry, values::host_address, &mut draft.overlay);
                }
                Field::RemoteLan => self.set_at(&entry, values::host_address, &mut draft.lan),
                // The splitters pass only keys that belong to the section.
                _ => {}
            }
        }
        draft
    }

    /// Returns the rules of an entry; warns if one allows a whole network although it names one
    /// host.
    fn rules(&mut self, entry: &Entry) -> Vec<Rule> {
        for item in &entry.items {
            let source = item.text.split_whitespace().next();
            if let Some(Ok(source)) = source.map(str::parse::<IpNet>) {
                self.reporter.truncate_prefix(entry.key, source, item.line);
            }
        }
        let rules = self.all(entry, values::rule).into_iter();
        rules.map(|rule| rule.value).collect()
    }

    /// Warns if a key that takes one value is repeated in its section.
    fn note_repetition(&mut self, entry: &Entry, given: &mut Given) {
        let again = given.add(entry);
        if again && entry.key.spec().shape == Shape::One {
            let message = "is given again: only the last one counts";
            let help = "remove the others";
            self.reporter
                .key_warning(entry.key, entry.line, message, help);
        }
    }

    /// Reports a key that is given both directly and by a path.
    fn note_two_sources(&mut self, key: Field, line: usize, given: &Given) {
        let other = match key {
            Field::PrivateKey => Field::PrivateKeyFile,
            Field::PrivateKeyFile => Field::PrivateKey,
            Field::PresharedKey => Field::PresharedKeyFile,
            _ => Field::PresharedKey,
        };
        if given.has(other) {
            let other = self.reporter.name(other);
            let message = format!("and `{other}` are both given");
            self.reporter
                .key_error(key, line, &message, "keep one of them");
        }
    }

    /// Reads a key from the value, or from the file that it names.
    fn key<T>(&mut self, entry: &Entry, parse: fn(&str) -> Result<T, Problem>) -> Option<At<T>> {
        let item = entry.items.first()?;
        let is_path = matches!(entry.key, Field::PrivateKeyFile | Field::PresharedKeyFile);
        let text = if is_path {
            self.read_key_file(entry.key, item)?
        } else {
            item.text.clone()
        };
        match parse(text.trim()) {
            Ok(value) => Some(At {
                value,
                line: entry.line,
            }),
            Err(mut problem) => {
                if is_path {
                    let path = item.text.as_str();
                    problem.message = format!("names `{path}`, whose content {}", problem.message);
                }
                self.reporter.problem(entry.key, entry.line, problem);
                None
            }
        }
    }

    fn read_key_file(&mut self, key: Field, item: &Item) -> Option<Zeroizing<String>> {
        match (self.read_key)(Path::new(item.text.as_str())) {
            Ok(text) => Some(text),
            Err(error) => {
                let message = format!("names `{}`: {error}", item.text.as_str());
                let help = "write the path of a file with one key, from the root or from this file's folder";
                self.reporter.key_error(key, item.line, &message, help);
                None
            }
        }
    }

    /// Parses one value of a key; reports it if it is invalid.
    fn parse<T>(
        &mut self,
        key: Field,
        item: &Item,
        parse: fn(&str) -> Result<T, Problem>,
    ) -> Option<At<T>> {
        match parse(&item.text) {
            Ok(value) => Some(At {
                value,
                line: item.line,
            }),
            Err(problem) => {
                self.reporter.problem(key, item.line, problem);
                None
            }
        }
    }

    /// Parses the single value of an entry.
    fn one<T>(&mut self, entry: &Entry, parse: fn(&str) -> Result<T, Problem>) -> Option<At<T>> {
        self.parse(entry.key, entry.items.first()?, parse)
    }

    /// Parses the values of an entry; reports invalid ones and returns the others.
    fn all<T>(&mut self, entry: &Entry, parse: fn(&str) -> Result<T, Problem>) -> Vec<At<T>> {
        let items = entry.items.iter();
        items
            .filter_map(|item| self.parse(entry.key, item, parse))
            .collect()
    }

    fn set<T>(
        &mut self,
        entry: &Entry,
        parse: fn(&str) -> Result<T, Problem>,
        slot: &mut Option<T>,
    ) {
        if let Some(at) = self.one(entry, parse) {
            *slot = Some(at.value);
        }
    }

    /// The same for values whose text may mean "none".
    fn set_option<T>(
        &mut self,
        entry: &Entry,
        parse: fn(&str) -> Result<Option<T>, Problem>,
        slot: &mut Option<T>,
    ) {
        if let Some(at) = self.one(entry, parse) {
            *slot = at.value;
        }
    }

    fn set_at<T>(
        &mut self,
        entry: &Entry,
        parse: fn(&str) -> Result<T, Problem>,
        slot: &mut Option<At<T>>,
    ) {
        if let Some(at) = self.one(entry, parse) {
            *slot = Some(at);
        }
    }
}

/// Returns the non-empty values of an entry as text.
fn texts(entry: &Entry) -> impl Iterator<Item = String> {
    let full = entry
        .items
        .iter()
        .filter(|item| !item.text.trim().is_empty());
    full.map(|item| item.text.trim().to_owned())
}
