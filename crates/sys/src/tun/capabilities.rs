//! The offloads of a TUN device: requested one by one, each absence with its reason.

use std::fmt;

use crate::ability::{Ability, write_table};

/// `TUN_F_TSO_ECN` of `linux/if_tun.h`.
pub(super) const TUN_F_TSO_ECN: u32 = 0x08;

/// The abilities of this device and kernel. "Reads" are packets that the kernel passes to this
/// process.
///
/// The offloads describe the packets that reads may return. Writes may use the same header types
/// whether or not they are enabled for reads, except USO, which the kernel must support (Linux
/// 6.2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunCapabilities {
    /// The kernel's virtio-net header. Without it the header is emulated, and no offload is
    /// possible.
    pub vnet_header: Ability,
    /// Reads may lack a checksum; writes may request one.
    pub checksum: Ability,
    /// Reads may return TCP super-packets over IPv4.
    pub tso4: Ability,
    /// Reads may return TCP super-packets over IPv6.
    pub tso6: Ability,
    /// TCP super-packets may have CWR set: bit 0x80 of `gso_type`, to be masked off.
    pub tso_ecn: Ability,
    /// Reads may return UDP super-packets over IPv4.
    pub uso4: Ability,
    /// Reads may return UDP super-packets over IPv6.
    pub uso6: Ability,
    /// More than one queue.
    pub multi_queue: Ability,
}

impl TunCapabilities {
    /// Returns names and abilities, in the order of their dependencies.
    pub fn table(&self) -> [(&'static str, &Ability); 8] {
        [
            ("vnet_header", &self.vnet_header),
            ("checksum", &self.checksum),
            ("tso4", &self.tso4),
            ("tso6", &self.tso6),
            ("tso_ecn", &self.tso_ecn),
            ("uso4", &self.uso4),
            ("uso6", &self.uso6),
            ("multi_queue", &self.multi_queue),
        ]
    }
}

impl fmt::Display for TunCapabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_table(f, &self.table())
    }
}

/// Whether TUNGETFEATURES listed `flag`.
pub(super) fn feature(features: u32, flag: libc::c_int, name: &str) -> Ability {
    match features & flag.cast_unsigned() {
        0 => Ability::Absent(format!("TUNGETFEATURES does not list {name}")),
        _ => Ability::Present,
    }
}

/// Returns capabilities without any offload, for the reason in `absent`.
pub(super) fn without_offload(
    vnet_header: Ability,
    multi_queue: Ability,
    absent: &Ability,
) -> TunCapabilities {
    TunCapabilities {
        vnet_header,
        checksum: absent.clone(),
        tso4: absent.clone(),
        tso6: absent.clone(),
        tso_ecn: absent.clone(),
        uso4: absent.clone(),
        uso6: absent.clone(),
        multi_queue,
    }
}

/// Returns capabilities with every offload.
pub(super) fn with_offload(multi_queue: Ability) -> TunCapabilities {
    TunCapabilities {
        vnet_header: Ability::Present,
        checksum: Ability::Present,
        tso4: Ability::Present,
        tso6: Ability::Present,
        tso_ecn: Ability::Present,
        uso4: Ability::Present,
        uso6: Ability::Present,
        multi_queue,
    }
}

/// Requests one offload after the other, and keeps the granted ones.
///
/// TUNSETOFFLOAD accepts the whole set or changes nothing. Dependencies: segmentation needs
/// checksums, ECN needs TSO, and USO is enabled for both families or not at all (`set_offload` in
/// drivers/net/tun.c). A refusal leaves the virtio-net header in place, so the framing does not
/// change.
pub(super) fn negotiate_offload(
    vnet_header: Ability,
    multi_queue: Ability,
    mut set: impl FnMut(u32) -> nix::Result<()>,
) -> TunCapabilities {
    let mut granted = 0;
    let mut ask = |bits: u32, what: &str, needs: u32, needed: &str| {
        if granted & needs != needs {
            return Ability::Absent(format!("{what} needs {needed}, which is absent"));
        }
        let outcome = set(granted | bits);
        if outcome.is_ok() {
            granted |= bits;
        }
        Ability::from_outcome(what, outcome)
    };
    let csum = libc::TUN_F_CSUM;
    let checksum = ask(csum, "TUN_F_CSUM", 0, "");
    let tso4 = ask(libc::TUN_F_TSO4, "TUN_F_TSO4", csum, "TUN_F_CSUM");
    let tso6 = ask(libc::TUN_F_TSO6, "TUN_F_TSO6", csum, "TUN_F_CSUM");
    let tso_ecn = ask(TUN_F_TSO_ECN, "TUN_F_TSO_ECN", csum, "TUN_F_CSUM");
    let uso = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let uso = ask(
        uso,
        "TUN_F_USO4 | TUN_F_USO6 (Linux 6.2)",
        csum,
        "TUN_F_CSUM",
    );
    TunCapabilities {
        vnet_header,
        checksum,
        tso4,
        tso6,
        tso_ecn,
        uso4: uso.clone(),
        uso6: uso,
        multi_queue,
    }
}
