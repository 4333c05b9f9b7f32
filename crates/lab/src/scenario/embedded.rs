//! The files of `scenarios/`, in the program.

macro_rules! files {
    ($($name:literal)*) => {
        /// Name and text of every scenario.
        pub const FILES: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../scenarios/", $name, ".toml")))),*];
    };
}

files! {
    "application-limited"
    "backlog-full"
    "bottleneck-elsewhere"
    "bufferbloat"
    "cipher-bound"
    "cipher-bound-crude"
    "conntrack-full"
    "copy-or-checksum-bound"
    "cpu-contention"
    "cpu-contention-receiver"
    "cpu-contention-switch"
    "cpu-quota"
    "cpu-quota-switch"
    "frame-per-syscall"
    "gro-breaks-encapsulation"
    "handoff-overhead"
    "healthy-bulk"
    "healthy-paced"
    "healthy-receiver"
    "healthy-switch"
    "healthy-udp"
    "mtu-black-hole"
    "mtu-black-hole-wire"
    "mtu-mismatch"
    "napi-budget"
    "offload-broken"
    "offload-broken-segmentation"
    "offload-missing"
    "offload-missing-switch"
    "outer-flow-cannot-spread"
    "outer-fragmentation"
    "packets-too-small"
    "path-delay"
    "path-loss"
    "path-loss-receiver"
    "path-loss-wire"
    "reordering"
    "shaper"
    "shaper-inner"
    "shaper-switch"
    "single-thread-saturated"
    "softirq-one-core"
    "tcp-outer-buffer"
    "tcp-over-tcp"
    "tcp-over-tcp-wire"
    "tcp-receive-window"
    "tun-queue-overflow"
    "udp-receive-buffer"
    "udp-receive-buffer-option"
    "udp-send-buffer"
    "virtual-switch-upcalls"
}
