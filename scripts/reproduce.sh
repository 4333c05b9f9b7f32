#!/usr/bin/env bash
# What others have published about slow tunnels, done again (root): installs what that takes, builds the program that can do
# without a cipher, and runs `seikan lab reproduce`.
#
#   scripts/reproduce.sh SOURCE... [OPTION...]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
target=${CARGO_TARGET_DIR:-target}

install_missing openvpn:openvpn ab:apache2-utils nginx:nginx-light openssl:openssl ovs-vswitchd:openvswitch-switch ip:iproute2

# Encrypts nothing and is run by nobody else: it is not what `make release` builds, and a release build cannot be it.
cargo build --locked --profile lab --features null-cipher -p seikan
SEIKAN_NULL_BIN=$(realpath "$target/lab/seikan") exec "$target/release/seikan" lab reproduce "$@"
