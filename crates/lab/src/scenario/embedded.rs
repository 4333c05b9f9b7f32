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
    "bufferbloat"
    "cipher-bound"
    "conntrack-full"
    "cpu-contention"
    "cpu-contention-receiver"
    "cpu-quota"
    "healthy-bulk"
    "healthy-paced"
    "healthy-receiver"
    "healthy-udp"
    "mtu-black-hole"
    "mtu-mismatch"
    "napi-budget"
    "offload-missing"
    "outer-fragmentation"
    "packets-too-small"
    "path-loss"
    "shaper"
    "shaper-inner"
    "single-thread-saturated"
    "softirq-one-core"
    "tcp-over-tcp"
    "tcp-receive-window"
    "tun-queue-overflow"
    "udp-receive-buffer"
    "udp-receive-buffer-option"
    "udp-send-buffer"
}
