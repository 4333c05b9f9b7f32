//! Recommended offload settings of the NICs on both sides of a gateway. Nothing is changed.
//!
//! A gateway is fast if packets are merged: GRO merges packets of devices, the tunnel carries super-packets,
//! and the NIC or kernel of the other side segments them. [`check`] is pure: settings in, findings out.

use seikan_sys::ethtool::FeatureState;
use serde::{Deserialize, Serialize};

/// Network of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// Network of the devices.
    Lan,
    /// Network that carries the tunnel.
    Wan,
}

/// A NIC to check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nic<'a> {
    /// Its name.
    pub interface: &'a str,
    /// Which network it is in.
    pub side: Side,
    /// Some device is in a VLAN.
    pub tagged: bool,
}

/// A setting that should be changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Finding {
    /// The NIC.
    pub interface: String,
    /// Name of the setting in `ethtool -k`.
    pub setting: String,
    /// Current value, `on` or `off`.
    pub is: String,
    /// Recommended value.
    pub should: String,
    /// Why.
    pub why: String,
    /// Command that changes it.
    pub command: String,
}

/// A recommended setting.
struct Recommendation {
    /// Name in `ethtool -k`.
    setting: &'static str,
    /// Name in `ethtool -K`.
    option: &'static str,
    /// The kernel's names of the features.
    bits: &'static [&'static str],
    should: bool,
    /// Reason on the devices' side; `None` if it does not matter there.
    lan: Option<&'static str>,
    /// Reason on the tunnel's side.
    wan: Option<&'static str>,
    /// Matters only with VLANs.
    only_tagged: bool,
}

/// By importance. On the tunnel's side `rx-gro-list` does not matter, since the kernel ignores it for sockets
/// that request merged datagrams (`udp_gro_receive()`, net/ipv4/udp_offload.c); nor does TSO, since the tunnel
/// sends UDP.
const RECOMMENDATIONS: &[Recommendation] = &[
    Recommendation {
        setting: "generic-receive-offload",
        option: "gro",
        bits: &["rx-gro"],
        should: true,
        lan: Some("packets from devices are not merged, so the gateway handles them one by one"),
        wan: Some("datagrams are not merged before the tunnel receives them"),
        only_tagged: false,
    },
    Recommendation {
        setting: "large-receive-offload",
        option: "lro",
        bits: &["rx-lro"],
        should: false,
        lan: Some("packets merged by the interface (LRO) cannot be split into the original ones"),
        wan: None,
        only_tagged: false,
    },
    Recommendation {
        setting: "rx-gro-list",
        option: "rx-gro-list",
        bits: &["rx-gro-list"],
        should: false,
        lan: Some("packets joined as a list cannot enter the tunnel as one"),
        wan: None,
        only_tagged: false,
    },
    Recommendation {
        setting: "rx-udp-gro-forwarding",
        option: "rx-udp-gro-forwarding",
        bits: &["rx-udp-gro-forwarding"],
        should: true,
        lan: Some(
            "UDP packets of devices (QUIC, video) are not merged, so the gateway handles them one by one",
        ),
        wan: None,
        only_tagged: false,
    },
    Recommendation {
        setting: "tx-checksumming",
        option: "tx",
        bits: &[
            "tx-checksum-ipv4",
            "tx-checksum-ip-generic",
            "tx-checksum-ipv6",
        ],
        should: true,
        lan: Some("no segmentation offload works without it"),
        wan: Some("kernels before 6.11 refuse the tunnel's segmented sends without it"),
        only_tagged: false,
    },
    Recommendation {
        setting: "generic-segmentation-offload",
        option: "gso",
        bits: &["tx-generic-segmentation"],
        should: true,
        lan: Some(
            "super-packets are segmented early, and their segments pass the network stack one by one",
        ),
        wan: Some(
            "the tunnel's datagrams are segmented early, and pass the network stack one by one",
        ),
        only_tagged: false,
    },
    Recommendation {
        setting: "tcp-segmentation-offload",
        option: "tso",
        bits: &["tx-tcp-segmentation", "tx-tcp6-segmentation"],
        should: true,
        lan: Some("the processor, not the interface, segments packets to devices"),
        wan: None,
        only_tagged: false,
    },
    Recommendation {
        setting: "tx-udp-segmentation",
        option: "tx-udp-segmentation",
        bits: &["tx-udp-segmentation"],
        should: true,
        lan: None,
        wan: Some("the processor, not the interface, segments the tunnel's datagrams"),
        only_tagged: false,
    },
    Recommendation {
        setting: "rx-vlan-offload",
        option: "rxvlan",
        bits: &["rx-vlan-hw-parse"],
        should: true,
        lan: Some("the processor, not the interface, removes VLAN tags"),
        wan: None,
        only_tagged: true,
    },
];

/// Returns the settings that should be changed. Settings that the driver has fixed or does not know are
/// skipped: nobody can change them.
pub fn check(nic: &Nic<'_>, features: &[FeatureState]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for recommendation in RECOMMENDATIONS {
        let why = match nic.side {
            Side::Lan => recommendation.lan,
            Side::Wan => recommendation.wan,
        };
        let Some(why) = why.filter(|_| nic.tagged || !recommendation.only_tagged) else {
            continue;
        };
        if is_on(recommendation, features) == Some(recommendation.should)
            || !can_change(recommendation, features)
        {
            continue;
        }
        let (is, should) = if recommendation.should {
            ("off", "on")
        } else {
            ("on", "off")
        };
        findings.push(Finding {
            interface: nic.interface.to_owned(),
            setting: recommendation.setting.to_owned(),
            is: is.to_owned(),
            should: should.to_owned(),
            why: why.to_owned(),
            command: format!(
                "ethtool -K {} {} {should}",
                nic.interface, recommendation.option
            ),
        });
    }
    findings
}

/// Returns the current values of the settings that matter here.
pub fn settings(features: &[FeatureState]) -> impl Iterator<Item = (&'static str, bool)> {
    RECOMMENDATIONS.iter().filter_map(|recommendation| {
        Some((recommendation.setting, is_on(recommendation, features)?))
    })
}

/// Whether any feature of the group is active, as `ethtool -k` summarises groups; `None` if the kernel knows
/// none of them.
fn is_on(recommendation: &Recommendation, features: &[FeatureState]) -> Option<bool> {
    let mut bits = of(recommendation, features).peekable();
    bits.peek()?;
    Some(bits.any(|bit| bit.active))
}

fn can_change(recommendation: &Recommendation, features: &[FeatureState]) -> bool {
    of(recommendation, features).any(|bit| bit.changeable && bit.active != recommendation.should)
}

fn of<'a>(
    recommendation: &Recommendation,
    features: &'a [FeatureState],
) -> impl Iterator<Item = &'a FeatureState> {
    let names = recommendation.bits;
    features.iter().filter(|bit| names.contains(&&*bit.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bit(name: &str, active: bool) -> FeatureState {
        FeatureState {
            name: name.into(),
            active,
            requested: active,
            changeable: true,
        }
    }

    /// A NIC with all recommended settings, on either side.
    fn good() -> Vec<FeatureState> {
        let all = RECOMMENDATIONS.iter();
        all.flat_map(|recommendation| {
            recommendation
                .bits
                .iter()
                .map(|name| bit(name, recommendation.should))
        })
        .collect()
    }

    fn with(name: &str, active: bool) -> Vec<FeatureState> {
        let mut features = good();
        for feature in &mut features {
            if feature.name == name {
                feature.active = active;
            }
        }
        features
    }

    fn commands(side: Side, tagged: bool, features: &[FeatureState]) -> Vec<String> {
        let nic = Nic {
            interface: "eth1",
            side,
            tagged,
        };
        let findings = check(&nic, features).into_iter();
        findings.map(|finding| finding.command).collect()
    }

    #[test]
    fn recommended_settings_give_no_finding() {
        for side in [Side::Lan, Side::Wan] {
            assert_eq!(commands(side, true, &good()), [""; 0]);
        }
    }

    #[test]
    fn receive_offload_must_be_on_at_both_sides() {
        for side in [Side::Lan, Side::Wan] {
            let found = commands(side, false, &with("rx-gro", false));
            assert_eq!(found, ["ethtool -K eth1 gro on"]);
        }
    }

    #[test]
    fn each_setting_has_its_command_where_it_matters() {
        for (name, active, lan, wan) in [
            ("rx-gro-list", true, "rx-gro-list off", ""),
            ("rx-lro", true, "lro off", ""),
            (
                "rx-udp-gro-forwarding",
                false,
                "rx-udp-gro-forwarding on",
                "",
            ),
            ("tx-generic-segmentation", false, "gso on", "gso on"),
            ("tx-udp-segmentation", false, "", "tx-udp-segmentation on"),
        ] {
            for (side, option) in [(Side::Lan, lan), (Side::Wan, wan)] {
                let expected = match option {
                    "" => vec![],
                    option => vec![format!("ethtool -K eth1 {option}")],
                };
                assert_eq!(commands(side, false, &with(name, active)), expected);
            }
        }
    }

    #[test]
    fn segmentation_is_off_only_if_it_is_for_both_families() {
        let mut features = with("tx-tcp-segmentation", false);
        assert_eq!(commands(Side::Lan, false, &features), [""; 0]);
        for bit in &mut features {
            bit.active &= bit.name != "tx-tcp6-segmentation";
        }
        assert_eq!(
            commands(Side::Lan, false, &features),
            ["ethtool -K eth1 tso on"]
        );
    }

    #[test]
    fn tags_matter_where_there_are_vlans() {
        let features = with("rx-vlan-hw-parse", false);
        assert_eq!(commands(Side::Lan, false, &features), [""; 0]);
        assert_eq!(
            commands(Side::Lan, true, &features),
            ["ethtool -K eth1 rxvlan on"]
        );
    }

    #[test]
    fn fixed_settings_give_no_finding() {
        let mut features = with("rx-gro", false);
        for bit in &mut features {
            bit.changeable = false;
        }
        assert_eq!(commands(Side::Lan, false, &features), [""; 0]);
        assert_eq!(commands(Side::Lan, false, &[]), [""; 0]);
    }
}
