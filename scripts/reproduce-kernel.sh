#!/usr/bin/env bash
# Runs `seikan lab reproduce profile` on a stock Debian kernel in a virtual machine: that kernel counts calls of its functions,
# which the source compared with throughput. Uses $SEIKAN_BIN or a release build. In emulation rates mean nothing, correlations do.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
. scripts/kernel-machine.sh

install_missing ovs-vswitchd:openvswitch-switch ip:iproute2
[ -n "${SEIKAN_BIN:-}" ] || cargo build --locked --release -p seikan-cli -p seikan-lab
seikan=${SEIKAN_BIN:-$target/release/seikan}
# The exit status includes comparisons of rates.
machine reproduce-kernel "for module in veth bridge tun; do modprobe \$module; done
mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
'$seikan' lab reproduce profile --seconds 2 --rounds 1 | tee /tmp/said || true
# A row of the list, not its title.
grep -q '^  calls of ' /tmp/said && echo 'reproduce-kernel: passed'"
