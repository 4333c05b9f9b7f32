//! Answers a DNS message for names of the mesh. Pure: a message in, a message out.
//!
//! The zones are [`DOMAIN`], in which a device is below the member that it is behind, and the reverse zones of the mesh's networks (RFC 1035, section 3.5; RFC 3596,
//! section 2.5). Answers for them are authoritative; a name without a member does not exist (RFC 2308). Names
//! are compared without regard to case (RFC 4343).

use hickory_proto::op::{
    Edns, Header, Message, MessageType, Metadata, OpCode, Query, ResponseCode,
};
use hickory_proto::rr::rdata::{A, AAAA, PTR, SOA};
use hickory_proto::rr::{DNSClass, Name as DomainName, RData, Record, RecordType};
use hickory_proto::serialize::binary::{
    BinDecodable as _, BinDecoder, BinEncodable as _, BinEncoder,
};
use ipnet::IpNet;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Change, Device, Member, Name};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Domain of the members' names.
pub const DOMAIN: &str = "seikan";
/// TTL of answers in seconds; short, because a member may be revoked.
const TTL: u32 = 10;
/// TTL of negative answers (RFC 2308) in seconds: a member that joins is found right away, and only this host
/// repeats queries.
const TTL_OF_NOTHING: u32 = 1;
/// Maximum size of a datagram without EDNS, in bytes (RFC 1035, section 2.3.4).
const MAX_PLAIN: u16 = 512;
/// Maximum size of a datagram in any case, in bytes: small enough never to be fragmented (RFC 9715, section
/// 3.1).
const MAX_DATAGRAM: u16 = 1232;

/// Transport of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The query arrived in a datagram, and the answer must fit one.
    Udp,
    /// The query arrived over a connection.
    Tcp,
}

/// Result for a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The answer.
    Answer(Vec<u8>),
    /// Another server has to answer.
    Forward,
    /// The message is not a query.
    Silence,
}

/// Names and addresses of members.
#[derive(Debug, Default)]
pub struct Zone {
    /// The membership is known; before that, no name is denied.
    is_known: bool,
    /// This host's own name, once known.
    own: Option<Name>,
    /// Addresses of the devices behind this host.
    own_devices: Devices,
    /// This host's own addresses, with the networks of the mesh.
    networks: Vec<IpNet>,
    members: BTreeMap<PublicKey, Entry>,
    /// Owner of each name, and of each address with the device; the latest if two members claim it.
    names: BTreeMap<Name, PublicKey>,
    addresses: BTreeMap<IpAddr, (PublicKey, Option<Name>)>,
    /// Incremented with each change.
    serial: u32,
}

/// Addresses of devices by name.
type Devices = BTreeMap<Name, Vec<IpAddr>>;

/// A member.
#[derive(Debug)]
struct Entry {
    name: Name,
    /// Its trusted addresses.
    addresses: Vec<IpAddr>,
    /// Devices behind it.
    devices: Devices,
}

/// A name in one of the zones.
struct Subject {
    /// The zone.
    zone: DomainName,
    /// Its records; `None` if the name does not exist.
    records: Option<Vec<RData>>,
}

impl Zone {
    /// Creates a zone of this host only; `networks` are its addresses with the networks of the mesh.
    pub fn new(networks: Vec<IpNet>) -> Zone {
        Zone {
            networks,
            ..Zone::default()
        }
    }

    /// Sets this host's own name.
    pub fn set_own(&mut self, name: Option<Name>) {
        self.own = name;
        self.serial = self.serial.wrapping_add(1);
    }

    /// Applies changes of the membership. As for peers, a coordinator is trusted for addresses inside the mesh
    /// only, so no name has another address.
    pub fn take(&mut self, changes: &[Change]) {
        self.is_known = true;
        for change in changes {
            match change {
                Change::Access(access) => {
                    self.own_devices = self.devices_of(&access.devices);
                    self.set_own(access.own.as_ref().map(|own| own.name.clone()));
                }
                Change::Set(member) => self.set(member),
                Change::Rotated(former, member) => {
                    self.remove(former);
                    self.set(member);
                }
                Change::Removed(key) | Change::Refused(key, _) => self.remove(key),
            }
            self.serial = self.serial.wrapping_add(1);
        }
    }

    fn set(&mut self, member: &Member) {
        self.remove(&member.public_key);
        let entry = Entry {
            name: member.name.clone(),
            addresses: self.others_of(&member.addresses),
            devices: self.devices_of(&member.devices),
        };
        let key = member.public_key;
        for (name, addresses) in &entry.devices {
            for address in addresses {
                self.addresses.insert(*address, (key, Some(name.clone())));
            }
        }
        for address in &entry.addresses {
            self.addresses.insert(*address, (key, None));
        }
        self.names.insert(entry.name.clone(), key);
        self.members.insert(key, entry);
    }

    /// Returns the addresses that are inside the mesh and not this host's own.
    fn others_of(&self, addresses: &[IpAddr]) -> Vec<IpAddr> {
        let is_own = |ip: &IpAddr| self.networks.iter().any(|net| net.addr() == *ip);
        let others = addresses.iter().copied();
        others
            .filter(|ip| self.is_inside(*ip) && !is_own(ip))
            .collect()
    }

    fn devices_of(&self, devices: &[Device]) -> Devices {
        let devices = devices.iter();
        let devices =
            devices.map(|device| (device.name.clone(), self.others_of(&device.addresses)));
        devices.collect()
    }

    fn remove(&mut self, key: &PublicKey) {
        let Some(entry) = self.members.remove(key) else {
            return;
        };
        if self.names.get(&entry.name) == Some(key) {
            self.names.remove(&entry.name);
        }
        let of_devices = entry.devices.into_values().flatten();
        for address in entry.addresses.into_iter().chain(of_devices) {
            if self
                .addresses
                .get(&address)
                .is_some_and(|(owner, _)| owner == key)
            {
                self.addresses.remove(&address);
            }
        }
    }

    fn is_inside(&self, ip: IpAddr) -> bool {
        self.networks.iter().any(|net| net.contains(&ip))
    }

    /// Handles a message. `recursive` says whether queries for other names are forwarded; otherwise they are
    /// refused.
    pub fn reply(&self, message: &[u8], transport: Transport, recursive: bool) -> Reply {
        let mut decoder = BinDecoder::new(message);
        let Ok(header) = Header::read(&mut decoder) else {
            return Reply::Silence;
        };
        // A response is never answered, or two servers could go on forever.
        if header.message_type == MessageType::Response {
            return Reply::Silence;
        }
        let mut answer = answer_to(&header.metadata);
        answer.metadata.recursion_available = recursive;
        let fail = |mut answer: Message, code| {
            answer.metadata.response_code = code;
            encoded(&answer, MAX_PLAIN)
        };
        if header.op_code != OpCode::Query {
            return fail(answer, ResponseCode::NotImp);
        }
        // RFC 9619: exactly one question.
        let query = Query::read(&mut decoder).ok();
        let Some(query) = query.filter(|_| header.counts.queries == 1) else {
            return fail(answer, ResponseCode::FormErr);
        };
        answer.add_query(query.clone());
        let Some(subject) = self.subject(query.name()) else {
            return if recursive {
                Reply::Forward
            } else {
                fail(answer, ResponseCode::Refused)
            };
        };
        let Ok(request) = Message::from_vec(message) else {
            answer.queries.clear();
            return fail(answer, ResponseCode::FormErr);
        };
        let mut max_size = MAX_PLAIN;
        if let Some(theirs) = &request.edns {
            max_size = theirs.max_payload().clamp(MAX_PLAIN, MAX_DATAGRAM);
            let mut ours = Edns::new();
            ours.set_max_payload(MAX_DATAGRAM);
            // RFC 3225, section 3: copied from the query.
            ours.set_dnssec_ok(theirs.flags().dnssec_ok);
            answer.set_edns(ours);
            if theirs.version() != 0 {
                return fail(answer, ResponseCode::BADVERS);
            }
        }
        if query.query_class() != DNSClass::IN {
            return fail(answer, ResponseCode::Refused);
        }
        if subject.records.is_none() && !self.is_known {
            return fail(answer, ResponseCode::ServFail);
        }
        self.fill(&mut answer, &query, subject);
        if transport == Transport::Tcp {
            max_size = u16::MAX;
        }
        encoded(&answer, max_size)
    }

    /// Adds the requested records to an answer, or the SOA record if there are none.
    fn fill(&self, answer: &mut Message, query: &Query, subject: Subject) {
        answer.metadata.authoritative = true;
        let wanted = query.query_type();
        let fits = |data: &RData| wanted == RecordType::ANY || data.record_type() == wanted;
        let found = subject.records.iter().flatten().filter(|data| fits(data));
        for data in found {
            let record = Record::from_rdata(query.name().clone(), TTL, data.clone());
            answer.add_answer(record);
        }
        if answer.answers.is_empty() {
            // RFC 2308, sections 2 and 3: the SOA record has the TTL of negative answers.
            let start = self.start_of_authority(&subject.zone);
            let start = RData::SOA(start);
            answer.add_authority(Record::from_rdata(subject.zone, TTL_OF_NOTHING, start));
        }
        if subject.records.is_none() {
            answer.metadata.response_code = ResponseCode::NXDomain;
        }
    }

    /// Returns the name's zone and records if this server is authoritative for it.
    fn subject(&self, name: &DomainName) -> Option<Subject> {
        let labels: Vec<&[u8]> = name.iter().collect();
        if let Some((domain, inside)) = labels.split_last()
            && domain.eq_ignore_ascii_case(DOMAIN.as_bytes())
        {
            let zone = DomainName::from_labels([DOMAIN]).ok()?;
            let records = match inside {
                [] => Some(vec![RData::SOA(self.start_of_authority(&zone))]),
                inside => self.addresses_of(inside).map(records),
            };
            return Some(Subject { zone, records });
        }
        let address = name.parse_arpa_name().ok()?;
        let net = self.networks.iter().find(|net| net.contains(&address))?;
        let whole = address.prefix_len() == address.max_prefix_len();
        let records = match (whole, self.name_of(address.addr())) {
            (true, Some((device, name))) => {
                let names = device.into_iter().chain([name]);
                let labels = names.map(Name::as_str).chain([DOMAIN]);
                Some(vec![RData::PTR(PTR(DomainName::from_labels(labels).ok()?))])
            }
            (true, None) => None,
            // There are names below this one.
            (false, _) => Some(Vec::new()),
        };
        let zone = reverse_zone(name, *net);
        Some(Subject { zone, records })
    }

    /// Returns the addresses of a member, as `db-1` or `db-1.seikan`, or of a device behind one, as
    /// `printer.gw-1.seikan`; none if the name is unknown. A dot at the end is ignored.
    pub fn find(&self, name: &str) -> Vec<IpAddr> {
        let name = name.strip_suffix('.').unwrap_or(name);
        let mut labels: Vec<&[u8]> = name.split('.').map(str::as_bytes).collect();
        if let [_, .., last] = labels[..]
            && last.eq_ignore_ascii_case(DOMAIN.as_bytes())
        {
            labels.pop();
        }
        self.addresses_of(&labels).unwrap_or_default()
    }

    /// Returns the addresses of a name in [`DOMAIN`]; `None` if it does not exist.
    fn addresses_of(&self, inside: &[&[u8]]) -> Option<Vec<IpAddr>> {
        match inside {
            [label] => self.addresses_of_member(label),
            [device, gateway] => self.addresses_of_device(device, gateway),
            _ => None,
        }
    }

    fn addresses_of_member(&self, label: &[u8]) -> Option<Vec<IpAddr>> {
        let name = name_in(label)?;
        if self.own.as_ref() == Some(&name) {
            return Some(self.networks.iter().map(IpNet::addr).collect());
        }
        let entry = self.members.get(self.names.get(&name)?)?;
        Some(entry.addresses.clone())
    }

    fn addresses_of_device(&self, device: &[u8], gateway: &[u8]) -> Option<Vec<IpAddr>> {
        let (device, gateway) = (name_in(device)?, name_in(gateway)?);
        let devices = if self.own.as_ref() == Some(&gateway) {
            &self.own_devices
        } else {
            &self.members.get(self.names.get(&gateway)?)?.devices
        };
        devices.get(&device).cloned()
    }

    /// Returns the device, if it is one, and the member with an address.
    fn name_of(&self, ip: IpAddr) -> Option<(Option<&Name>, &Name)> {
        if self.networks.iter().any(|net| net.addr() == ip) {
            return Some((None, self.own.as_ref()?));
        }
        let mut own = self.own_devices.iter();
        if let Some((device, _)) = own.find(|(_, addresses)| addresses.contains(&ip)) {
            return Some((Some(device), self.own.as_ref()?));
        }
        let (key, device) = self.addresses.get(&ip)?;
        Some((device.as_ref(), &self.members.get(key)?.name))
    }

    fn start_of_authority(&self, zone: &DomainName) -> SOA {
        let [server, mailbox] = [zone.clone(), zone.clone()];
        // No server transfers this zone: the timers of secondaries are only required by the format.
        let (refresh, retry, expire) = (TTL as i32, TTL as i32, TTL as i32);
        SOA::new(
            server,
            mailbox,
            self.serial,
            refresh,
            retry,
            expire,
            TTL_OF_NOTHING,
        )
    }
}

fn name_in(label: &[u8]) -> Option<Name> {
    std::str::from_utf8(label).ok()?.parse().ok()
}

fn records(addresses: Vec<IpAddr>) -> Vec<RData> {
    let data = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => RData::A(A(ip)),
        IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
    };
    addresses.into_iter().map(data).collect()
}

/// Returns the reverse zone of a network: labels are whole bytes of IPv4, whole nibbles of IPv6.
fn reverse_zone(name: &DomainName, net: IpNet) -> DomainName {
    let bits = if net.max_prefix_len() == 32 { 8 } else { 4 };
    // The labels of the prefix, and the two labels of `in-addr.arpa` or `ip6.arpa`.
    name.trim_to(usize::from(net.prefix_len() / bits) + 2)
}

/// Returns the SERVFAIL answer to a query; `None` if the message is not a query.
pub(super) fn failure(query: &[u8]) -> Option<Vec<u8>> {
    let mut decoder = BinDecoder::new(query);
    let header = Header::read(&mut decoder).ok()?;
    let mut answer = answer_to(&header.metadata);
    answer.metadata.recursion_available = true;
    answer.metadata.response_code = ResponseCode::ServFail;
    answer.queries.extend(Query::read(&mut decoder).ok());
    match encoded(&answer, MAX_PLAIN) {
        Reply::Answer(bytes) => Some(bytes),
        _ => None,
    }
}

/// Whether a message is the answer to a query: same id, same question.
pub(super) fn is_answer(query: &[u8], answer: &[u8]) -> bool {
    let read = |bytes| {
        let mut decoder = BinDecoder::new(bytes);
        let header = Header::read(&mut decoder).ok()?;
        let query = Query::read(&mut decoder).ok()?;
        Some((header.metadata, query))
    };
    match (read(query), read(answer)) {
        (Some((request, sent)), Some((response, answered))) => {
            response.message_type == MessageType::Response
                && response.id == request.id
                && sent == answered
        }
        _ => false,
    }
}

fn answer_to(request: &Metadata) -> Message {
    let mut answer = Message::response(request.id, request.op_code);
    answer.metadata = Metadata::response_from_request(request);
    answer
}

/// Encodes an answer; records above the size limit are left out and the TC flag is set.
fn encoded(answer: &Message, max_size: u16) -> Reply {
    let mut bytes = Vec::with_capacity(usize::from(MAX_PLAIN));
    let mut encoder = BinEncoder::new(&mut bytes);
    encoder.set_max_size(max_size);
    match answer.emit(&mut encoder) {
        Ok(()) => Reply::Answer(bytes),
        // The question of a query always fits.
        Err(_) => Reply::Silence,
    }
}

#[cfg(test)]
mod tests;
