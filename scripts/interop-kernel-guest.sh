#!/usr/bin/env bash
# Runs inside the virtual machine of interop-kernel.sh, as root: two namespaces, a veth pair, WireGuard at each end. First
# `seikan bench` measures interfaces of its own.
#
#   ka: 10.90.0.1, fd90::1 ----veth---- kb: 10.90.0.2, fd90::2       underlay
#   wga: 10.91.0.1, fd91::1             wgb: 10.91.0.2, fd91::2      overlay
#
# $ENDS lists pairs of implementations: "seikan kernel,kernel seikan". The first of a pair has the endpoint of the
# second configured, not the reverse, so the first is the initiator.
set -euo pipefail
umask 077
dir=$(mktemp -d)
cd "$dir"
for module in wireguard veth tun; do modprobe "$module"; done
wg genkey >a.key && wg pubkey <a.key >a.pub
wg genkey >b.key && wg pubkey <b.key >b.pub
wg genpsk >psk
head -c 4000000 /dev/urandom >sent
pids=()

cleanup() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
    pids=()
    for n in ka kb; do ip netns del $n 2>/dev/null || true; done
}
trap 'status=$?; cleanup; [ $status = 0 ] || { tail -n 20 ./*.log; echo "interop-kernel: FAILED"; }' EXIT

# config SIDE NUMBER OTHER ENDPOINT PSK: a wg-quick file (`wg setconf` gets it without the address)
config() {
    cat <<EOF
[Interface]
PrivateKey = $(cat "$1.key")
ListenPort = 51820
Address = 10.91.0.$2/24, fd91::$2/64

[Peer]
PublicKey = $(cat "$3.pub")
AllowedIPs = 10.91.0.0/24, fd91::/64
EOF
    [ -z "$4" ] || echo "Endpoint = $4"
    [ "$5" = no ] || echo "PresharedKey = $(cat psk)"
}

# end SIDE NUMBER IMPLEMENTATION
end() {
    if [ "$3" = kernel ]; then
        ip -n "k$1" link add "wg$1" type wireguard
        ip netns exec "k$1" wg setconf "wg$1" <(grep -v ^Address "wg$1.conf")
        ip -n "k$1" addr add "10.91.0.$2/24" dev "wg$1"
        ip -n "k$1" addr add "fd91::$2/64" dev "wg$1" nodad
        ip -n "k$1" link set "wg$1" mtu 1420 up
    else
        ip netns exec "k$1" "$SEIKAN" up "$dir/wg$1.conf" --protocol wireguard >"$3.$1.log" 2>&1 &
        pids+=($!)
        for _ in $(seq 100); do ip -n "k$1" addr show dev "wg$1" 2>/dev/null | grep -q 10.91 && return; sleep 0.2; done
        echo "the interface of $3 did not come up" && return 1
    fi
}

# transfer FROM TO ADDRESS: four megabytes over TCP, compared byte by byte
transfer() {
    rm -f received
    ip netns exec "$2" python3 -c 'import socket,sys
s = socket.create_server((sys.argv[1], 7000), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
open("listening", "w")
c, _ = s.accept(); c.settimeout(60)
with open("received", "wb") as f:
    while b := c.recv(65536): f.write(b)' "$3" &
    local server=$!
    for _ in $(seq 100); do [ ! -e listening ] || break; sleep 0.1; done
    ip netns exec "$1" timeout 90 python3 -c 'import socket,sys
c = socket.create_connection((sys.argv[1], 7000), timeout=60); c.sendall(open("sent", "rb").read())' "$3"
    wait "$server"
    rm -f listening
    cmp sent received
}

# underlay: the two namespaces and their link
underlay() {
    ip netns add ka && ip netns add kb
    ip link add ua netns ka type veth peer name ub netns kb
    for side in a b; do
        number=$([ $side = a ] && echo 1 || echo 2)
        ip -n k$side addr add 10.90.0.$number/24 dev u$side
        ip -n k$side addr add fd90::$number/64 dev u$side nodad
        ip -n k$side link set u$side up && ip -n k$side link set lo up
    done
}

# until CONDITION...: waits for it
until_so() {
    for _ in $(seq 600); do ! eval "$*" || return 0; sleep 0.1; done
    echo "in vain: $*" && return 1
}

# bench: `seikan bench` measures interfaces of its own, and leaves none, also if it is killed
bench() {
    underlay
    printf '#!/bin/sh\nshift\nexport SSH_CONNECTION="10.90.0.1 1 10.90.0.2 22"\nexec ip netns exec kb sh -c "$*"\n' >ssh
    chmod +x ssh
    local command=(ip netns exec ka "$SEIKAN" bench kb --ssh "$dir/ssh" --program "$SEIKAN" --seconds 2 --json)
    # The kernel has a thread for each interface, named after it.
    local interfaces='grep -qs "^wg-crypt-wg-ben" /proc/[0-9]*/comm'
    "${command[@]}" >bench.json 2>bench.log
    python3 -c 'import json
path = json.load(open("bench.json"))["kernel_wireguard"]
assert path["figures"], path["unavailable"]
for direction in "to_far", "from_far":
    assert path["figures"][direction]["tcp_bits_per_second"] > 1e6, path
    assert path["figures"][direction]["udp"]["most_bits_per_second"] > 1e6, path
print("WireGuard of the kernel, measured by bench:", path["figures"]["to_far"]["tcp_bits_per_second"] / 1e6, "Mbit/s")'
    until_so "! $interfaces"
    "${command[@]}" >killed.json 2>killed.log &
    local running=$!
    until_so "$interfaces"
    kill -9 $running
    wait $running 2>/dev/null || true
    until_so "! $interfaces"
    cleanup
    echo "ok: bench with the kernel's WireGuard"
}

[ ! -x "${SEIKAN:-}" ] || bench
IFS=, read -ra pairs <<<"$ENDS"
for psk in no yes; do
    for pair in "${pairs[@]}"; do
        read -r first second <<<"$pair"
        for underlay in 10.90.0.2 '[fd90::2]'; do
            title="$first initiates to $second over $underlay, preshared key: $psk"
            underlay
            config a 1 b "$underlay:51820" $psk >wga.conf
            config b 2 a "" $psk >wgb.conf
            end b 2 "$second"
            end a 1 "$first"
            ip netns exec ka ping -q -c 3 -i 0.3 -w 20 10.91.0.2 >/dev/null
            ip netns exec kb ping -q -c 3 -i 0.3 -w 20 10.91.0.1 >/dev/null
            ip netns exec ka ping -q -c 3 -i 0.3 -w 20 fd91::2 >/dev/null
            ip netns exec ka ping -q -c 2 -i 0.3 -w 20 -s 1392 -M do 10.91.0.2 >/dev/null
            transfer ka kb 10.91.0.2
            transfer kb ka fd91::1
            [ "$second" != kernel ] || ip netns exec kb wg show wgb latest-handshakes | grep -qv '	0$'
            cleanup
            echo "ok: $title"
        done
    done
done
echo "interop-kernel: passed"
