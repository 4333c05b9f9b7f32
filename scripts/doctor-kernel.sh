#!/usr/bin/env bash
# Tests the doctor on a stock Debian kernel in a virtual machine: calls of kernel functions (level 3), which need kprobes,
# and the kernel's own WireGuard and VXLAN. Uses $SEIKAN_BIN or a release build.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/kernel-machine.sh

[ -n "${SEIKAN_BIN:-}" ] || cargo build --locked --release -p seikan-cli
machine doctor-kernel "SEIKAN='${SEIKAN_BIN:-$target/release/seikan}' '$PWD/scripts/doctor-kernel-guest.sh'"
