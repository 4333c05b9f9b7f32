#!/usr/bin/env bash
# Reproduces published measurements of slow tunnels (root): installs the tools, builds a program that can disable its cipher,
# and runs `seikan lab reproduce`.
#
#   scripts/reproduce.sh SOURCE... [OPTION...]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
target=${CARGO_TARGET_DIR:-target}

install_missing openvpn:openvpn ab:apache2-utils nginx:nginx-light openssl:openssl ovs-vswitchd:openvswitch-switch ip:iproute2

# This build can run without encryption. `make release` builds another, and a release build cannot have the feature.
cargo build --locked --profile lab --features null-cipher -p seikan-cli
SEIKAN_NULL_BIN=$(realpath "$target/lab/seikan") exec "$target/release/seikan" lab reproduce "$@"
