//! The gateway's sections: values have types, and nothing is required yet.

use std::net::IpAddr;

use ipnet::IpNet;
use seikan_proto::gateway::rules::Rule;
use seikan_wire::ethernet::Mac;

use super::GatewayMode;
use crate::check::masked;
use crate::interpret::{At, Context, Given};
use crate::schema::{Entry, Field, Section};
use crate::types::InterfaceName;
use crate::values;

/// The gateway's sections so far.
#[derive(Default)]
pub(crate) struct GatewayDraft {
    pub section: Option<GatewaySection>,
    pub devices: Vec<DeviceDraft>,
    pub remotes: Vec<RemoteDraft>,
}

/// `[gateway]` so far.
#[derive(Default)]
pub(crate) struct GatewaySection {
    /// Line of the section's header.
    pub line: usize,
    pub given: Given,
    pub interface: Option<At<InterfaceName>>,
    pub mode: Option<GatewayMode>,
    /// With their host bits.
    pub answer_for: Vec<At<IpNet>>,
    pub proxy_arp: Option<At<bool>>,
    pub priority: Option<At<u8>>,
}

/// One `[[gateway.device]]` so far.
#[derive(Default)]
pub(crate) struct DeviceDraft {
    /// Line of the section's header.
    pub line: usize,
    pub given: Given,
    pub name: Option<At<String>>,
    pub mac: Option<At<Mac>>,
    pub vlan: Option<At<u16>>,
    pub lan: Vec<At<IpAddr>>,
    pub overlay: Vec<At<IpAddr>>,
    pub allow_from: Vec<Rule>,
    pub allow_to: Vec<Rule>,
}

/// One `[[gateway.remote]]` so far.
#[derive(Default)]
pub(crate) struct RemoteDraft {
    /// Line of the section's header.
    pub line: usize,
    pub given: Given,
    pub overlay: Option<At<IpAddr>>,
    pub lan: Option<At<IpAddr>>,
}

impl GatewaySection {
    /// Returns an empty section.
    pub fn new(line: usize) -> Self {
        Self {
            line,
            ..Self::default()
        }
    }
}

impl DeviceDraft {
    /// Returns the device's name for messages.
    pub fn described(&self) -> String {
        match &self.name {
            Some(name) => format!("the device `{}`", name.value),
            None => format!("the device in line {}", self.line),
        }
    }

    /// The VLAN, if there is one.
    pub fn vlan(&self) -> Option<u16> {
        self.vlan.as_ref().map(|vlan| vlan.value)
    }
}

// The splitters pass only keys that belong to the section.
impl Context<'_, '_, '_> {
    pub(crate) fn gateway(&mut self, section: Section, draft: &mut GatewaySection) {
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
                _ => {}
            }
        }
    }

    pub(crate) fn device(&mut self, section: Section) -> DeviceDraft {
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
                _ => {}
            }
        }
        draft
    }

    pub(crate) fn remote(&mut self, section: Section) -> RemoteDraft {
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
                masked(entry.key, source, item.line, self.reporter);
            }
        }
        self.all(entry, values::rule)
            .map(|rule| rule.value)
            .collect()
    }
}
