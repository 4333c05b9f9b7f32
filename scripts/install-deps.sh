#!/usr/bin/env bash
# Installs missing tools for `make test`: Debian packages, Rust components, cargo-deny and cargo-nextest. The Rust toolchain
# itself must exist. Cargo's tools go to $TOOLS/bin, once per version.
#
#   scripts/install-deps.sh           everything
#   scripts/install-deps.sh build     the requirements of a build
#   scripts/install-deps.sh book      mdBook, for `make book`
set -euo pipefail
. "$(dirname "$0")/packages.sh"

command -v cargo >/dev/null || { echo "there is no cargo: install a Rust toolchain (https://rustup.rs), then run this again" >&2; exit 1; }
# command:package
build=(cc:gcc /usr/include/stdio.h:libc6-dev /etc/ssl/certs/ca-certificates.crt:ca-certificates)
if [ "${1:-}" = build ]; then
    install_missing "${build[@]}"
    exit
fi
if [ "${1:-}" = book ]; then
    : "${TOOLS:=${CARGO_HOME:-$HOME/.cargo}/seikan-tools}"
    mdbook=0.5.4
    install_missing "${build[@]}" python3:python3
    [ "$("$TOOLS/bin/mdbook" --version 2>/dev/null)" = "mdbook v$mdbook" ] ||
        cargo install -q --locked --debug --no-default-features --features search --root "$TOOLS" "mdbook@$mdbook"
    exit
fi
needs=("${build[@]}" c++:g++ git:git python3:python3 awk:mawk ps:procps pip3:python3-pip ip:iproute2 ping:iputils-ping wg:wireguard-tools column:bsdextrautils
    nft:nftables iperf3:iperf3 curl:curl nginx:nginx-light dropbear:dropbear-bin
    etcd:etcd-server etcdctl:etcd-client systemd-analyze:systemd openvpn:openvpn ovs-vswitchd:openvswitch-switch
    miniupnpd:miniupnpd-nftables faketime:faketime turnserver:coturn dbus-daemon:dbus-daemon tinyproxy:tinyproxy-bin)
command -v go >/dev/null || needs+=(go:golang-go)

install_missing "${needs[@]}"

# systemd-resolved, for its test, is unpacked and not installed: the package would change this machine's resolver. Its libraries are installed.
: "${TOOLS:=${CARGO_HOME:-$HOME/.cargo}/seikan-tools}"
mkdir -p "$TOOLS/bin"
if [ -x /lib/systemd/systemd-resolved ]; then
    ln -sf /lib/systemd/systemd-resolved "$TOOLS/bin/"
elif ! "$TOOLS/bin/systemd-resolved" --version >/dev/null 2>&1; then
    install_missing systemd-shared:libsystemd-shared
    dir=$(mktemp -d)
    (cd "$dir" && apt-get -o APT::Sandbox::User=root download -q systemd-resolved >/dev/null && dpkg-deb -x systemd-resolved_*.deb root)
    mkdir -p "$TOOLS/resolved"
    install "$dir"/root/lib/systemd/systemd-resolved "$dir"/root/usr/bin/resolvectl "$TOOLS/resolved/"
    ln -sf ../resolved/systemd-resolved "$TOOLS/bin/"
    rm -rf "$dir"
fi

# tracefs, the source of drop reasons. Init systems mount it, containers do not.
[ "$(id -u)" != 0 ] || [ -e /sys/kernel/tracing/events ] || mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null || true

for component in rustfmt clippy; do
    cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1 || rustup component add "$component"
done

# cargo_tool NAME VERSION SHA256: installs the published x86-64 wheel with this checksum by pip, else builds it from source (minutes).
cargo_tool() {
    local name=$1 version=$2 sum=$3 dir
    [ "$("$TOOLS/bin/$name" --version 2>/dev/null | awk 'NR == 1 { print $1, $2 }')" != "$name $version" ] || return 0
    echo "installing $name $version"
    dir=$(mktemp -d)
    if [ "$(uname -m)" = x86_64 ] && echo "astral-dev-toolchain-$name==$version --hash=sha256:$sum" >"$dir/requirements" &&
        python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
            -d "$dir" -r "$dir/requirements" 2>/dev/null &&
        python3 -m zipfile -e "$dir"/*.whl "$dir/wheel"; then
        install -m 755 "$dir/wheel/"*.data/scripts/"$name" "$TOOLS/bin/"
    else
        cargo install -q --locked --debug --root "$TOOLS" "$name@$version"
    fi
    rm -rf "$dir"
}
cargo_tool cargo-deny 0.20.2 ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee
cargo_tool cargo-nextest 0.9.148 76d7faec7ba7e1f15f888268761bb1449309b1eb801ec5cbe9c04a5685f42968
