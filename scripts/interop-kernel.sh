#!/usr/bin/env bash
# Tests Seikan against the WireGuard of a stock Debian kernel, in a virtual machine.
#
#   scripts/interop-kernel.sh                  both roles, with and without a preshared key; $SEIKAN_BIN or a release build
#   scripts/interop-kernel.sh --kernel-only    the kernel at both ends, which tests the harness; needs no binary
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/kernel-machine.sh

ends="seikan kernel
kernel seikan"
if [ "${1:-}" = --kernel-only ]; then
    ends="kernel kernel"
elif [ -z "${SEIKAN_BIN:-}" ]; then
    cargo build --locked --release -p seikan-cli
fi
binary=${SEIKAN_BIN:-$target/release/seikan}

machine interop-kernel "SEIKAN='$binary' ENDS='${ends//$'\n'/,}' '$PWD/scripts/interop-kernel-guest.sh'"
