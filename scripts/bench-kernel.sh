#!/usr/bin/env bash
# Runs `seikan bench` in a virtual machine with a stock Debian kernel, against this host, over a native tunnel between
# them. Uses $SEIKAN_BIN or a release build.
#
#   this host: 10.99.0.1 on bridge sbr ----tap, virtio---- 10.99.0.2 in the machine      underlay
#              10.98.0.1 on sba                            10.98.0.2 on sbb              tunnel
#
# All of it is in namespaces of its own. Instead of SSH, a TCP connection to port 7777 starts `seikan bench --serve` on
# this host.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/kernel-machine.sh

if [ "${1:-}" != inside ]; then
    [ -n "${SEIKAN_BIN:-}" ] || cargo build --locked --release -p seikan-cli
    install_machine
    # The machine does not see all directories for temporary files.
    dir=$(mktemp -d -p "$target")
    trap 'rm -rf "$dir"' EXIT
    # --kill-child ends all processes in the namespaces with unshare.
    unshare --net --pid --fork --kill-child --mount-proc scripts/bench-kernel.sh inside "$dir" &
    trap 'kill -9 $!; exit 1' INT TERM
    wait $!
    exit
fi

dir=$2
export TMPDIR=$dir
binary=$(realpath "${SEIKAN_BIN:-$target/release/seikan}")
export SEIKAN_RUN_DIR=$dir/run
mkdir -m 700 "$SEIKAN_RUN_DIR"
(
    umask 077
    for side in a b; do
        wg genkey >"$dir/$side.key"
        wg pubkey <"$dir/$side.key" >"$dir/$side.pub"
    done
)

# config SIDE NUMBER OTHER OTHER_NUMBER ENDPOINT: a wg-quick file
config() {
    (umask 077 && cat >"$dir/sb$1.conf") <<EOF
[Interface]
PrivateKey = $(cat "$dir/$1.key")
ListenPort = 51820
Address = 10.98.0.$2/24

[Peer]
PublicKey = $(cat "$dir/$3.pub")
AllowedIPs = 10.98.0.$4/32
$5
EOF
}
config a 1 b 2 ''
config b 2 a 1 'Endpoint = 10.99.0.1:51820'

ip link set lo up
ip link add sbr type bridge
ip tuntap add sbtap mode tap
ip link set sbtap master sbr up
ip addr add 10.99.0.1/24 dev sbr
ip link set sbr up
"$binary" up "$dir/sba.conf" --protocol native >"$dir/host.log" 2>&1 &

cat >"$dir/serve.py" <<'EOF'
import os, socket, subprocess, sys
server = socket.create_server(("10.99.0.1", 7777))
while True:
    connection, _ = server.accept()
    environment = dict(os.environ, SSH_CONNECTION="10.99.0.2 1 10.99.0.1 22")
    subprocess.Popen([sys.argv[1], "bench", "--serve"], stdin=connection, stdout=connection, env=environment)
    connection.close()
EOF
python3 "$dir/serve.py" "$binary" &

printf '#!/bin/sh\nexec busybox nc 10.99.0.1 7777\n' >"$dir/ssh"
chmod +x "$dir/ssh"
cat >"$dir/guest.sh" <<EOF
set -e
modprobe tun
device=\$(basename "\$(dirname /sys/class/net/*/device)")
ip addr add 10.99.0.2/24 dev "\$device"
ip link set "\$device" up
ip link set lo up
"$binary" up "$dir/sbb.conf" --protocol native >/tmp/up.log 2>&1 &
for _ in \$(seq 100); do ping -q -c 1 -W 1 10.98.0.1 >/dev/null 2>&1 && break; sleep 0.2; done
"$binary" bench host --ssh "$dir/ssh" --program seikan
"$binary" bench host --ssh "$dir/ssh" --program seikan --seconds 2 --json >/tmp/bench.json
python3 -c 'import json
page = json.load(open("/tmp/bench.json"))
for path in "raw", "tunnel":
    for direction in "to_far", "from_far":
        assert page[path]["figures"][direction]["tcp_bits_per_second"] > 1e6, page[path]'
echo "bench-kernel: passed"
EOF

machine_options=("--qemu-opts=-netdev tap,id=n0,ifname=sbtap,script=no,downscript=no -device virtio-net-pci,netdev=n0")
machine bench-kernel "bash '$dir/guest.sh'" || { tail -n 20 "$dir/host.log" && false; }
