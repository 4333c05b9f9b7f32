#!/usr/bin/env bash
# The program for aarch64, emulated by QEMU, has tunnels with the program for x86-64: Ethernet and IP mode, WireGuard, both ciphers,
# pings and transfers in both directions, compared byte by byte. The emulated processor has instructions for AES. QEMU translates
# no netlink message about routing rules, as if the kernel had no policy routing, and no firewall mark: no tunnel here carries the
# default route. Nor are Landlock and seccomp there.
. ./machines.sh
set -euo pipefail
trap '[ $? = 0 ] || tail -n 40 "$work"/*.log' EXIT
mkdir "$work/emulated" "$work/native"
tar -C "$work/emulated" --strip-components=1 -xzf "$dist"/seikan-*-linux-aarch64.tar.gz
tar -C "$work/native" --strip-components=1 -xzf "$dist"/seikan-*-linux-x86_64.tar.gz
# The program refuses to drop privileges beside a second thread. QEMU has one of its own, which is hidden here: it looks for each
# file below this folder first.
mkdir -p "$work/prefix/proc/self/task/1"

# program NAME ARGUMENTS...: the program of one end
program() {
    local runner=()
    [ "$1" = native ] || runner=(qemu-aarch64-static -L "$work/prefix")
    SEIKAN_RUN_DIR=$work/run-$1 SEIKAN_STATE_DIR=$work/state-$1 ip netns exec "$1" "${runner[@]}" "$work/$1/bin/seikan" "${@:2}"
}
# fetch SERVER CLIENT ADDRESS: the bytes over HTTP
fetch() {
    ip netns exec "$1" python3 -m http.server --directory "$work/served" --bind "$3" 8000 >/dev/null 2>&1 &
    local server=$!
    eventually 20 ip netns exec "$1" python3 -c "import socket; socket.create_connection(('$3', 8000), 1)"
    ip netns exec "$2" python3 -c "
import urllib.request
received = urllib.request.urlopen('http://$3:8000/bytes', timeout=120).read()
assert received == open('$work/served/bytes', 'rb').read(), len(received)"
    kill $server
    wait $server 2>/dev/null || :
}
# configure NAME NUMBER LINES: the interface has the name of the end
configure() {
    local other=emulated number=$((3 - $2))
    [ "$1" = native ] || other=native
    cat >"$work/$1.toml" <<END
private-key-file = "$1.key"
listen-port = 51820
address = "10.9.0.$2/24"
$3
[[peer]]
public-key = "$(program native pubkey <"$work/$other.key")"
endpoint = "192.0.2.$number:51820"
allowed-ips = "10.9.0.$number/32"
END
}
# tunnel LINES EXPECTED-CIPHER: a tunnel with lines of configuration
tunnel() {
    local name pid pids=()
    log "$1"
    configure emulated 1 "$1"
    configure native 2 "$1"
    for name in emulated native; do
        program $name up "$work/$name.toml" >"$work/$name.log" 2>&1 &
        pids+=($!)
    done
    eventually 60 ip netns exec native ping -c 1 -W 1 10.9.0.1
    eventually 20 ip netns exec emulated ping -c 1 -W 1 10.9.0.2
    fetch emulated native 10.9.0.1
    fetch native emulated 10.9.0.2
    program emulated status --json emulated >"$work/emulated.json"
    program native status --json native >"$work/native.json"
    cat "$work/emulated.log"
    program emulated status emulated
    python3 - "$work/emulated.json" "$work/native.json" "$2" <<'END'
import json, sys
for file in sys.argv[1:3]:
    status = json.load(open(file))
    assert status["peers"][0]["cipher"] == sys.argv[3], status["peers"][0]
    for direction in ("inbound", "outbound"):
        assert status["totals"][direction]["unaccounted"] == 0, status["totals"]
END
    for name in emulated native; do
        program $name down $name
    done
    for pid in "${pids[@]}"; do
        wait "$pid"
    done
    echo "= $1, $2: pings and 8 MB in each direction"
}

ip link add switch type bridge
ip link set switch up
number=0
for name in emulated native; do
    number=$((number + 1))
    ip netns add $name
    ip link add port-$name type veth peer name eth0 netns $name
    ip link set port-$name master switch up
    ip -n $name link set lo up
    ip -n $name link set eth0 up
    ip -n $name address add 192.0.2.$number/24 dev eth0
done
echo "= $(program emulated --version) for aarch64: $(stat -c %s "$work/emulated/bin/seikan") bytes, static"
umask 077
for name in emulated native; do
    program $name genkey >"$work/$name.key"
done
[ "$(program emulated pubkey <"$work/native.key")" = "$(program native pubkey <"$work/native.key")" ] || fail "another public key"
mkdir "$work/served"
head -c 8000000 /dev/urandom >"$work/served/bytes"
tunnel 'mode = "ethernet"' AES-256-GCM
tunnel 'cipher = "aes-256-gcm"' AES-256-GCM
tunnel 'cipher = "chacha20-poly1305"' ChaCha20-Poly1305
tunnel 'protocol = "wireguard"' ChaCha20-Poly1305
# The default route needs the mark and the rules: the tunnel must not start without them.
configure emulated 1 'cipher = "auto"'
sed -i 's/^allowed-ips.*/allowed-ips = "0.0.0.0\/0"/' "$work/emulated.toml"
! program emulated up "$work/emulated.toml" >"$work/emulated.log" 2>&1 || fail "a tunnel of all traffic has no mark"
grep -q 'cannot set firewall mark' "$work/emulated.log"
for name in emulated native; do
    ip netns delete $name
done
ip link delete switch
