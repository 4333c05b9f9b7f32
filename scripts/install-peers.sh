#!/usr/bin/env bash
# Installs other tunnels at pinned versions into a directory; skips those that exist.
#
#   scripts/install-peers.sh [DIR] [PEER...]     DIR [default: target/peers]; PEER [default: all below that `seikan lab bench` runs unasked]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
out=$(realpath -m "${1:-target/peers}")
shift || true
peers=("$@")
[ ${#peers[@]} -gt 0 ] || peers=(wireguard-go wireguard-go-tailscale boringtun gotatun nebula openvpn)

# Go 1.21 and later fetch the version that a module requires. For an older Go (Debian 12 has 1.19) install such a version first.
recent_go() {
    local had=go1.21 go=golang.org/toolchain@v0.0.1-go1.24.0.linux-amd64 folder
    [ "$(printf '%s\n' $had "$(go env GOVERSION)" | sort -V | head -n 1)" != $had ] || return 0
    folder=$(go env GOMODCACHE)/$go
    if [ ! -x "$folder/bin/go" ]; then
        (cd "$(mktemp -d)" && go mod init any && go mod download $go) >/dev/null 2>&1
        chmod +x "$folder"/bin/* "$folder"/pkg/tool/*/*
    fi
    export PATH=$folder/bin:$PATH
}

# go_tool BINARY MODULE@VERSION
go_tool() {
    [ ! -x "$out/$1" ] || return 0
    echo "installing $2"
    recent_go
    GOBIN=$out GOFLAGS=-mod=mod go install "$2"
}

# cargo_tool BINARY CRATE@VERSION; builds in a temporary target directory, as it shares nothing with ours.
cargo_tool() {
    [ ! -x "$out/$1" ] || return 0
    echo "installing $2"
    local build
    build=$(mktemp -d)
    CARGO_TARGET_DIR=$build/target cargo install -q --locked --root "$build" "$2"
    mv "$build/bin/$1" "$out/"
    rm -rf "$build"
}

mkdir -p "$out"
for peer in "${peers[@]}"; do
    case $peer in
    wireguard-go) go_tool wireguard golang.zx2c4.com/wireguard@v0.0.0-20260522210424-ecfc5a8d5446 ;;
    wireguard-go-tailscale) go_tool wireguard-go github.com/tailscale/wireguard-go@v0.0.0-20260622165914-65d8d42c9a5a ;;
    boringtun) cargo_tool boringtun-cli boringtun-cli@0.7.1 ;;
    gotatun) cargo_tool gotatun gotatun-cli@0.10.2 ;;
    nebula) for tool in nebula nebula-cert; do go_tool $tool "github.com/slackhq/nebula/cmd/$tool@v1.11.0"; done ;;
    openvpn) install_missing openvpn:openvpn ;;
    wireproxy) go_tool wireproxy github.com/pufferffish/wireproxy/cmd/wireproxy@v1.0.9 ;;
    *) echo "unknown peer $peer" >&2 && exit 2 ;;
    esac
done
