//! Addresses of interfaces.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NlasIterator, Parseable};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeader, AddressHeaderFlags, AddressMessage,
};

use super::{Family, Netlink, NetlinkError};

/// `struct ifaddrmsg`.
const ADDRESS_HEADER_SIZE: usize = 8;

/// Options of adding an address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AddressOptions {
    /// IPv6: usable at once, without duplicate address detection (`IFA_F_NODAD`), which otherwise
    /// takes a second or more.
    pub no_dad: bool,
    /// Do not make the route to the address's network (`IFA_F_NOPREFIXROUTE`).
    pub no_prefix_route: bool,
    /// Succeed if the address exists already.
    pub replace: bool,
}

/// An address that an interface has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// Interface index.
    pub index: u32,
    /// The address with the prefix length of its network.
    pub net: IpNet,
    /// The other end of a point-to-point link, if it has an address of its own.
    pub peer: Option<IpAddr>,
    /// IPv6: duplicate address detection has not finished, so the address cannot be used yet.
    pub tentative: bool,
    /// IPv6: another host has the address.
    pub dad_failed: bool,
    /// IPv6: a temporary address for privacy (RFC 8981).
    pub temporary: bool,
    /// New connections must not use it: it will expire soon (RFC 4862, section 5.5.4).
    pub deprecated: bool,
}

impl Netlink {
    /// Adds an address (with its host bits) to an interface.
    pub fn add_address(&self, index: u32, address: IpNet) -> Result<(), NetlinkError> {
        self.add_address_with(index, address, AddressOptions::default())
    }

    /// Adds an address with options.
    pub fn add_address_with(
        &self,
        index: u32,
        address: IpNet,
        options: AddressOptions,
    ) -> Result<(), NetlinkError> {
        let mut message = address_message(index, address);
        let mut flags = AddressFlags::empty();
        flags.set(
            AddressFlags::Nodad,
            options.no_dad && address.addr().is_ipv6(),
        );
        flags.set(AddressFlags::Noprefixroute, options.no_prefix_route);
        if !flags.is_empty() {
            message.attributes.push(AddressAttribute::Flags(flags));
        }
        let mode = if options.replace {
            NLM_F_REPLACE
        } else {
            NLM_F_EXCL
        };
        self.change(
            RouteNetlinkMessage::NewAddress(message),
            NLM_F_CREATE | mode,
            |netlink| {
                format!(
                    "add the address {address} to {}",
                    netlink.describe_link(index)
                )
            },
        )
    }

    /// Removes an address from an interface.
    pub fn delete_address(&self, index: u32, address: IpNet) -> Result<(), NetlinkError> {
        let message = RouteNetlinkMessage::DelAddress(address_message(index, address));
        self.change(message, 0, |netlink| {
            format!(
                "remove the address {address} from {}",
                netlink.describe_link(index)
            )
        })
    }

    /// Returns the addresses of one interface, including link-local ones.
    pub fn addresses(&self, index: u32) -> Result<Vec<Address>, NetlinkError> {
        let mut addresses = self.all_addresses()?;
        addresses.retain(|address| address.index == index);
        Ok(addresses)
    }

    /// Returns the addresses of all interfaces of the namespace.
    pub fn all_addresses(&self) -> Result<Vec<Address>, NetlinkError> {
        self.dump(
            RouteNetlinkMessage::GetAddress(AddressMessage::default()),
            |_, payload| parse_address(payload),
            |_| "list the addresses".into(),
        )
    }
}

fn address_message(index: u32, address: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = Family::of(address.addr()).into();
    message.header.prefix_len = address.prefix_len();
    message.header.index = index;
    message.attributes = vec![
        AddressAttribute::Local(address.addr()),
        AddressAttribute::Address(address.addr()),
    ];
    message
}

/// Parses `RTM_NEWADDR` or `RTM_DELADDR`.
pub(super) fn parse_address(payload: &[u8]) -> Option<Address> {
    let header = AddressHeader::parse(payload).ok()?;
    let (mut local, mut address) = (None, None);
    let mut flags = header.flags;
    for nla in NlasIterator::new(payload.get(ADDRESS_HEADER_SIZE..)?).map_while(Result::ok) {
        match AddressAttribute::parse(&nla) {
            Ok(AddressAttribute::Local(ip)) => local = Some(ip),
            Ok(AddressAttribute::Address(ip)) => address = Some(ip),
            Ok(AddressAttribute::Flags(wide)) => {
                flags |= AddressHeaderFlags::from_bits_retain(wide.bits() as u8);
            }
            _ => {}
        }
    }
    // With IFA_LOCAL, IFA_ADDRESS is the peer's (include/uapi/linux/if_addr.h).
    let own = local.or(address)?;
    Some(Address {
        index: header.index,
        net: IpNet::new(own, header.prefix_len).ok()?,
        peer: address.filter(|&peer| peer != own),
        tentative: flags.contains(AddressHeaderFlags::Tentative),
        dad_failed: flags.contains(AddressHeaderFlags::Dadfailed),
        // For IPv4 the same bit has another meaning.
        temporary: own.is_ipv6() && flags.contains(AddressHeaderFlags::Secondary),
        deprecated: flags.contains(AddressHeaderFlags::Deprecated),
    })
}
