//! Offloads of an interface, read and changed as by ethtool(8): `ioctl(SIOCETHTOOL)` with
//! `ETHTOOL_GFEATURES` and `ETHTOOL_SFEATURES` (include/uapi/linux/ethtool.h). The kernel provides
//! the names of its feature bits (`ETH_SS_FEATURES`). A [`Feature`] is the group of bits that a
//! short option of ethtool (`tso`, `tx` ...) stands for.

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use crate::netlink::link::check_name;

const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETH_SS_FEATURES: u32 = 4;
/// `ETH_GSTRING_LEN`, in 32-bit words.
const STRING_WORDS: usize = 32 / 4;
/// More feature bits than any kernel has; there are 64 today.
const FEATURES_MAX: usize = 1024;

/// A group of offloads, as in ethtool(8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// `rx`: the device verifies checksums of received packets.
    RxChecksum,
    /// `tx`: the device fills in checksums. TSO and UDP segmentation need it.
    TxChecksum,
    /// `sg`: packets in several pieces.
    ScatterGather,
    /// `tso`: TCP segmentation.
    Tso,
    /// `gso`: segmentation by the kernel, just before the driver.
    Gso,
    /// `gro`: receive aggregation by the kernel.
    Gro,
    /// `tx-udp-segmentation`.
    UdpSegmentation,
    /// `rx-gro-list`: forwarded datagrams (and TCP segments) are joined as a list of packets.
    GroList,
    /// `rx-udp-gro-forwarding`: forwarded UDP datagrams are joined as segments.
    UdpGroForwarding,
    /// `rx-gro-hw`: receive aggregation by the device that can be undone.
    HardwareGro,
    /// `lro`: receive aggregation by the device that cannot be undone; harmful where packets are
    /// forwarded.
    Lro,
    /// `rxvlan`: the device removes VLAN tags.
    RxVlan,
    /// `txvlan`: the device inserts VLAN tags.
    TxVlan,
}

impl std::str::FromStr for Feature {
    type Err = String;

    /// Parses the short option of `ethtool -K`.
    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Ok(match word {
            "rx" => Self::RxChecksum,
            "tx" => Self::TxChecksum,
            "sg" => Self::ScatterGather,
            "tso" => Self::Tso,
            "gso" => Self::Gso,
            "gro" => Self::Gro,
            "tx-udp-segmentation" => Self::UdpSegmentation,
            "rx-gro-list" => Self::GroList,
            "rx-udp-gro-forwarding" => Self::UdpGroForwarding,
            "rx-gro-hw" => Self::HardwareGro,
            "lro" => Self::Lro,
            "rxvlan" => Self::RxVlan,
            "txvlan" => Self::TxVlan,
            _ => return Err(format!("`{word}` is not the name of an offload")),
        })
    }
}

impl Feature {
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::RxChecksum => &["rx-checksum"],
            Self::TxChecksum => &[
                "tx-checksum-ipv4",
                "tx-checksum-ip-generic",
                "tx-checksum-ipv6",
                "tx-checksum-fcoe-crc",
                "tx-checksum-sctp",
            ],
            Self::ScatterGather => &["tx-scatter-gather"],
            Self::Tso => &[
                "tx-tcp-segmentation",
                "tx-tcp-ecn-segmentation",
                "tx-tcp-mangleid-segmentation",
                "tx-tcp6-segmentation",
            ],
            Self::Gso => &["tx-generic-segmentation"],
            Self::Gro => &["rx-gro"],
            Self::UdpSegmentation => &["tx-udp-segmentation"],
            Self::GroList => &["rx-gro-list"],
            Self::UdpGroForwarding => &["rx-udp-gro-forwarding"],
            Self::HardwareGro => &["rx-gro-hw"],
            Self::Lro => &["rx-lro"],
            Self::RxVlan => &["rx-vlan-hw-parse"],
            Self::TxVlan => &["tx-vlan-hw-insert"],
        }
    }
}

/// One feature bit of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureState {
    /// The kernel's name, as `ethtool -k` shows it.
    pub name: String,
    /// Whether the feature is in effect.
    pub active: bool,
    /// Requested; not in effect while something that it needs is off.
    pub requested: bool,
    /// Can be changed.
    pub changeable: bool,
}

/// Why an offload could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum EthtoolError {
    /// The kernel refused.
    #[error("cannot {action} of interface {interface}: {source}{}", remedy(source))]
    Refused {
        /// The action, as in "cannot ...".
        action: &'static str,
        /// The interface.
        interface: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The name cannot be an interface name.
    #[error("`{interface}` cannot be an interface name")]
    InvalidName {
        /// The name as given.
        interface: String,
    },
    /// The driver does not allow a change of the offload.
    #[error("interface {interface} has {feature:?} fixed: its driver does not allow switching it {}", on_off(*on))]
    Fixed {
        /// The interface.
        interface: String,
        /// The offload.
        feature: Feature,
        /// The requested state.
        on: bool,
    },
    /// The kernel accepted the request but did not change the state.
    #[error("interface {interface} keeps {feature:?} {}: switch the offload that it depends on first", on_off(!*on))]
    Kept {
        /// The interface.
        interface: String,
        /// The offload.
        feature: Feature,
        /// The requested state.
        on: bool,
    },
}

fn remedy(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EPERM) => "; run as root or give the process CAP_NET_ADMIN",
        Some(libc::ENODEV) => "; `ip link` lists the interfaces",
        Some(libc::EOPNOTSUPP) => "; its driver has no offload settings",
        _ => "",
    }
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// A handle on the offloads of the interfaces of one network namespace.
#[derive(Debug)]
pub struct Ethtool {
    socket: UdpSocket,
}

/// The argument of the ioctl: `struct ifreq` with `ifr_data`.
#[repr(C)]
struct Request {
    name: [libc::c_char; libc::IFNAMSIZ],
    data: *mut u32,
    /// The rest of the union in `struct ifreq`, all of which the kernel copies.
    rest: [u8; 24 - size_of::<*mut u32>()],
}

impl Ethtool {
    /// Opens a handle for the calling thread's network namespace. Reading needs no privilege.
    pub fn open() -> io::Result<Self> {
        // Any socket can issue the ioctl; an unbound one neither sends nor receives.
        Ok(Self {
            socket: UdpSocket::bind("[::]:0").or_else(|_| UdpSocket::bind("0.0.0.0:0"))?,
        })
    }

    /// Returns all feature bits that the kernel knows, with their state on an interface.
    pub fn features(&self, interface: &str) -> Result<Vec<FeatureState>, EthtoolError> {
        let names = self.feature_names(interface)?;
        let blocks = names.len().div_ceil(32);
        let mut data = vec![0u32; 2 + 4 * blocks];
        data[..2].copy_from_slice(&[ETHTOOL_GFEATURES, blocks as u32]);
        self.call(interface, &mut data, "read the offloads")?;
        let bit = |index: usize, column: usize| {
            data[2 + 4 * (index / 32) + column] & (1 << (index % 32)) != 0
        };
        Ok(names
            .into_iter()
            .enumerate()
            .map(|(index, name)| FeatureState {
                name,
                active: bit(index, 2),
                requested: bit(index, 1),
                changeable: bit(index, 0) && !bit(index, 3),
            })
            .collect())
    }

    /// Whether any bit of the group is in effect on an interface.
    pub fn feature(&self, interface: &str, feature: Feature) -> Result<bool, EthtoolError> {
        let states = self.features(interface)?;
        Ok(states
            .iter()
            .any(|state| state.active && feature.names().contains(&&*state.name)))
    }

    /// Changes a group of offloads. Fixed bits within the group are skipped. It is an error if all
    /// are fixed, or if the kernel does not change the group.
    pub fn set_feature(
        &self,
        interface: &str,
        feature: Feature,
        on: bool,
    ) -> Result<(), EthtoolError> {
        let states = self.features(interface)?;
        let of: Vec<&FeatureState> = states
            .iter()
            .filter(|state| feature.names().contains(&&*state.name))
            .collect();
        if !of.iter().any(|state| state.changeable) {
            let is_set = of.iter().any(|state| state.active) == on;
            return is_set.then_some(()).ok_or(EthtoolError::Fixed {
                interface: interface.into(),
                feature,
                on,
            });
        }
        self.switch(interface, &states, |state| {
            feature.names().contains(&&*state.name).then_some(on)
        })?;
        if self.feature(interface, feature)? == on {
            Ok(())
        } else {
            Err(EthtoolError::Kept {
                interface: interface.into(),
                feature,
                on,
            })
        }
    }

    /// Requests bits by the kernel's names, each on or off. Bits that do not exist or are fixed are
    /// skipped.
    pub fn set_bits(&self, interface: &str, bits: &[(String, bool)]) -> Result<(), EthtoolError> {
        let states = self.features(interface)?;
        self.switch(interface, &states, |state| {
            let (_, on) = bits.iter().find(|(name, _)| *name == state.name)?;
            (*on != state.requested).then_some(*on)
        })
    }

    /// Changes every changeable bit for which `wanted` returns a state.
    fn switch(
        &self,
        interface: &str,
        states: &[FeatureState],
        wanted: impl Fn(&FeatureState) -> Option<bool>,
    ) -> Result<(), EthtoolError> {
        let blocks = states.len().div_ceil(32);
        let mut data = vec![0u32; 2 + 2 * blocks];
        data[..2].copy_from_slice(&[ETHTOOL_SFEATURES, blocks as u32]);
        for (index, state) in states.iter().enumerate() {
            if let Some(on) = wanted(state).filter(|_| state.changeable) {
                let (block, mask) = (2 + 2 * (index / 32), 1 << (index % 32));
                data[block] |= mask;
                data[block + 1] |= if on { mask } else { 0 };
            }
        }
        self.call(interface, &mut data, "switch the offloads")
    }

    fn feature_names(&self, interface: &str) -> Result<Vec<String>, EthtoolError> {
        let action = "read the names of the offloads";
        // struct ethtool_sset_info: a 64-bit mask of sets, then the length of each set asked for.
        let mask = (1u64 << ETH_SS_FEATURES).to_ne_bytes();
        let half =
            |at: usize| u32::from_ne_bytes([mask[at], mask[at + 1], mask[at + 2], mask[at + 3]]);
        let mut info = [ETHTOOL_GSSET_INFO, 0, half(0), half(4), 0];
        self.call(interface, &mut info, action)?;
        let count = (info[4] as usize).min(FEATURES_MAX);

        let mut data = vec![0u32; 3 + count * STRING_WORDS];
        data[..3].copy_from_slice(&[ETHTOOL_GSTRINGS, ETH_SS_FEATURES, count as u32]);
        self.call(interface, &mut data, action)?;
        Ok(data[3..]
            .chunks_exact(STRING_WORDS)
            .map(|words| {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                let length = bytes
                    .iter()
                    .position(|&byte| byte == 0)
                    .unwrap_or(bytes.len());
                String::from_utf8_lossy(&bytes[..length]).into_owned()
            })
            .collect())
    }

    /// Issues the ioctl. `data` starts with the command and must be as long as the structure of the
    /// command.
    fn call(
        &self,
        interface: &str,
        data: &mut [u32],
        action: &'static str,
    ) -> Result<(), EthtoolError> {
        check_name(interface).map_err(|_| EthtoolError::InvalidName {
            interface: interface.into(),
        })?;
        let mut request = Request {
            name: [0; libc::IFNAMSIZ],
            data: data.as_mut_ptr(),
            rest: [0; 24 - size_of::<*mut u32>()],
        };
        for (to, from) in request.name.iter_mut().zip(interface.bytes()) {
            *to = from as libc::c_char;
        }
        // SAFETY: `request` is laid out and sized as struct ifreq, its name ends in zero (at most
        // 15 bytes were written), and `data` outlives the call and is as long as the count in it
        // says, which bounds what the kernel reads and writes.
        let outcome = unsafe {
            libc::ioctl(
                self.socket.as_raw_fd(),
                libc::SIOCETHTOOL as _,
                &raw mut request,
            )
        };
        // ETHTOOL_SFEATURES returns a positive set of flags; the state is read back instead.
        if outcome >= 0 {
            return Ok(());
        }
        let source = io::Error::last_os_error();
        Err(EthtoolError::Refused {
            action,
            interface: interface.into(),
            source,
        })
    }
}

const _: () = assert!(size_of::<Request>() == size_of::<libc::ifreq>());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::NetNs;
    use crate::test_namespace::namespace;
    use crate::testing::in_child;

    /// Creates a namespace with the veth pair `v0` and `v1`.
    fn pair() -> Option<(NetNs, Ethtool)> {
        let namespace = namespace()?;
        namespace
            .netlink()
            .unwrap()
            .create_veth("v0", "v1", None)
            .unwrap();
        let ethtool = namespace.ethtool().unwrap();
        Some((namespace, ethtool))
    }

    #[test]
    fn every_offload_of_a_veth_can_be_switched_off_and_on() {
        let Some((_namespace, ethtool)) = pair() else {
            return;
        };
        for feature in [
            Feature::Gro,
            Feature::Gso,
            Feature::Tso,
            Feature::TxChecksum,
            Feature::UdpSegmentation,
            Feature::GroList,
            Feature::UdpGroForwarding,
            Feature::RxVlan,
            Feature::TxVlan,
        ] {
            for on in [false, true] {
                ethtool.set_feature("v0", feature, on).unwrap();
                assert_eq!(ethtool.feature("v0", feature).unwrap(), on, "{feature:?}");
            }
        }
    }

    #[test]
    fn every_group_has_a_name_that_the_kernel_knows() {
        let Some((_namespace, ethtool)) = pair() else {
            return;
        };
        let states = ethtool.features("v0").unwrap();
        for feature in [
            Feature::RxChecksum,
            Feature::TxChecksum,
            Feature::ScatterGather,
            Feature::Tso,
            Feature::Gso,
            Feature::Gro,
            Feature::UdpSegmentation,
            Feature::GroList,
            Feature::UdpGroForwarding,
            Feature::HardwareGro,
            Feature::Lro,
            Feature::RxVlan,
            Feature::TxVlan,
        ] {
            for name in feature.names() {
                assert!(states.iter().any(|state| state.name == *name), "{name}");
            }
        }
    }

    #[test]
    fn the_other_interface_keeps_its_offloads() {
        let Some((_namespace, ethtool)) = pair() else {
            return;
        };
        ethtool.set_feature("v0", Feature::Tso, false).unwrap();
        assert!(ethtool.feature("v1", Feature::Tso).unwrap());
    }

    #[test]
    fn segmentation_goes_with_the_checksum_it_needs() {
        // netdev_fix_features(), net/core/dev.c.
        let Some((_namespace, ethtool)) = pair() else {
            return;
        };
        ethtool
            .set_feature("v0", Feature::TxChecksum, false)
            .unwrap();
        assert!(!ethtool.feature("v0", Feature::Tso).unwrap());
        let error = ethtool.set_feature("v0", Feature::Tso, true).unwrap_err();
        assert!(matches!(error, EthtoolError::Kept { .. }), "{error}");
    }

    #[test]
    fn switching_the_receive_aggregation_off_is_seen_by_the_legacy_command() {
        // ETHTOOL_GGRO, an older command with a separate path in the kernel.
        const ETHTOOL_GGRO: u32 = 0x2b;
        let Some((_namespace, ethtool)) = pair() else {
            return;
        };
        for on in [true, false] {
            ethtool.set_feature("v0", Feature::Gro, on).unwrap();
            let mut value = [ETHTOOL_GGRO, 7];
            ethtool.call("v0", &mut value, "read").unwrap();
            assert_eq!(value[1], u32::from(on));
        }
    }

    #[test]
    fn a_fixed_offload_says_so() {
        let Some((_namespace, ethtool)) = pair() else {
            return;
        };
        let error = ethtool
            .set_feature("lo", Feature::TxChecksum, false)
            .unwrap_err();
        assert!(matches!(error, EthtoolError::Fixed { .. }), "{error}");
        ethtool
            .set_feature("lo", Feature::TxChecksum, true)
            .unwrap();
    }

    #[test]
    fn an_absent_interface_is_named() {
        let Some((_namespace, ethtool)) = pair() else {
            return;
        };
        let text = ethtool.features("absent").unwrap_err().to_string();
        assert!(
            text.contains("absent") && text.contains("ip link"),
            "{text}"
        );
    }

    #[test]
    fn an_overlong_name_never_reaches_the_kernel() {
        let ethtool = Ethtool::open().unwrap();
        let error = ethtool.features("a-name-of-16-byt").unwrap_err();
        assert!(matches!(error, EthtoolError::InvalidName { .. }), "{error}");
    }

    #[test]
    fn without_the_capability_it_can_be_read_but_not_switched() {
        let Some((_namespace, ethtool)) = pair() else {
            return;
        };
        in_child(|| {
            caps::clear(None, caps::CapSet::Effective).map_err(|e| e.to_string())?;
            ethtool.features("v0").map_err(|e| e.to_string())?;
            match ethtool.set_feature("v0", Feature::Gro, true) {
                Err(error) if error.to_string().contains("CAP_NET_ADMIN") => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }
}
