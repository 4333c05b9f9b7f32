#!/usr/bin/env bash
# Runs inside the virtual machine of doctor-kernel.sh, as root: two namespaces, a veth pair, a tunnel of the kernel.
#
#   ka: 10.90.0.1 ----veth---- kb: 10.90.0.2        ua, ub
#   ka: 10.91.0.1 ---tunnel--- kb: 10.91.0.2        ta, tb: vxlan or wireguard
set -euo pipefail
umask 077
dir=$(mktemp -d)
cd "$dir"
pids=()

cleanup() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
    pids=()
    for n in ka kb; do ip netns del $n 2>/dev/null || true; done
}
trap 'status=$?; cleanup; [ $status = 0 ] || { tail -n 40 ./*.json ./*.log; echo "doctor-kernel: FAILED"; }' EXIT

for module in veth vxlan wireguard tun nf_conntrack; do modprobe $module; done
mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug
tracing=/sys/kernel/tracing
mountpoint -q $tracing || mount -t tracefs tracefs $tracing
probes=/sys/kernel/debug/kprobes/list

# tunnel KIND MTU
tunnel() {
    local side n other
    ip netns add ka && ip netns add kb
    ip link add ua netns ka type veth peer name ub netns kb
    for side in a b; do
        n=$([ $side = a ] && echo 1 || echo 2)
        other=$((3 - n))
        ip -n k$side addr add 10.90.0.$n/24 dev u$side
        ip -n k$side link set u$side up && ip -n k$side link set lo up
        if [ "$1" = vxlan ]; then
            ip -n k$side link add t$side type vxlan id 7 local 10.90.0.$n remote 10.90.0.$other dstport 4789
        else
            ip -n k$side link add t$side type wireguard
        fi
    done
    if [ "$1" = wireguard ]; then
        wg genkey >a.key && wg genkey >b.key
        ip netns exec ka wg set ta listen-port 51820 private-key a.key \
            peer "$(wg pubkey <b.key)" allowed-ips 10.91.0.0/24 endpoint 10.90.0.2:51820
        ip netns exec kb wg set tb listen-port 51820 private-key b.key \
            peer "$(wg pubkey <a.key)" allowed-ips 10.91.0.0/24 endpoint 10.90.0.1:51820
    fi
    for side in a b; do
        n=$([ $side = a ] && echo 1 || echo 2)
        ip -n k$side addr add 10.91.0.$n/24 dev t$side
        ip -n k$side link set t$side mtu "$2" up
    done
    ip netns exec ka ping -q -c 3 -i 0.3 -w 20 10.91.0.2 >/dev/null
}

# near COMMAND: runs it in ka's network with this /sys; that of `ip netns exec` has no tracefs
near() {
    nsenter --net=/run/netns/ka "$@"
}

# doctor NAME OPTIONS: writes its output to NAME.json
doctor() {
    near "$SEIKAN" doctor --json "${@:2}" >"$1.json"
}

fail() {
    echo "$*"
    exit 1
}

# Waits until a doctor has set its probes: their number has grown and is stable.
until_probed() {
    local last now
    last=$(wc -l <$probes)
    for _ in $(seq 60); do
        sleep 2
        now=$(wc -l <$probes)
        [ "$now" -le "$before" ] || [ "$now" != "$last" ] || return 0
        last=$now
    done
    fail "no probe was set"
}

# says FILE EXPRESSION: checks a Python expression over `v`, the JSON
says() {
    python3 -c 'import json, sys
v = json.load(open(sys.argv[1]))
for f in v.get("evidence", []): print("  ", f["name"], round(f["value"], 4))
if not eval(sys.argv[2]): sys.exit("%s: not so: %s" % (v.get("cause"), sys.argv[2]))' "$1.json" "$2"
}

# Starts a sink for TCP and UDP in kb.
sink() {
    ip netns exec kb python3 -c 'import socket, threading
def take(c):
    while c.recv(1 << 20): pass
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("10.91.0.2", 7000))
threading.Thread(target=take, args=(u,), daemon=True).start()
s = socket.create_server(("10.91.0.2", 7000))
while True: threading.Thread(target=take, args=(s.accept()[0],), daemon=True).start()' &
    pids+=($!)
    sleep 2
}

# datagrams NUMBER BYTES PER_SECOND
datagrams() {
    ip netns exec ka python3 -c 'import socket, sys, time
number, size, rate = map(int, sys.argv[1:])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); begun = time.monotonic()
for i in range(number):
    s.sendto(bytes(size), ("10.91.0.2", 7000))
    time.sleep(max(0, begun + i / rate - time.monotonic()))' "$@"
}

# Sends over TCP at full speed until it is killed.
stream() {
    ip netns exec ka python3 -c 'import socket
c = socket.create_connection(("10.91.0.2", 7000))
while True: c.sendall(bytes(65536))' 2>/dev/null &
    pids+=($!)
}

packets_sent() {
    near cat /proc/net/dev | awk '$1 == "ta:" { print $11 }'
}

# hits FUNCTION: prints the count of our own probe
hits() {
    awk -v name="check_$1" '$1 == name { print $2 }' $tracing/kprobe_profile
}

# calls FUNCTION: how often the doctor counted it, from its table
calls() {
    awk -v name="$1" '$1 == name { gsub(",", "", $2); print $2 }' table.log
}

echo "1. calls of functions: $(wc -l <$probes) probes before"
tunnel vxlan 1500
sink
functions=(udp_sendmsg ip_do_fragment ip_defrag)
for function in "${functions[@]}"; do echo "p:check_$function $function" >>$tracing/kprobe_events; done
echo 1 >$tracing/events/kprobes/enable
before=$(wc -l <$probes)
declare -A first
for function in "${functions[@]}"; do first[$function]=$(hits $function); done
sent=3000
doctor calls --iface ta --level 3 --seconds 40 --no-probe --record calls.parquet &
looking=$!
until_probed
sleep 8
echo "$(($(wc -l <$probes) - before)) probes while it looks"
packets=$(packets_sent)
datagrams $sent 1472 500
packets=$(($(packets_sent) - packets))
[ "$(wc -l <$probes)" -gt "$before" ] || fail "the load did not end in time"
wait $looking
[ "$(wc -l <$probes)" = "$before" ] || fail "probes are left behind: $(cat $probes)"
"$SEIKAN" doctor --from calls.parquet --verbose >table.log
sed -n '/^calls, by/,$p' table.log
for function in "${functions[@]}"; do
    counted=$(calls $function) independent=$(($(hits $function) - ${first[$function]}))
    echo "$function: doctor $counted, tracefs $independent, $sent sent"
    # Each datagram is sent once, cut once, and arrives as two fragments.
    expected=$([ $function = ip_defrag ] && echo $((2 * sent)) || echo $sent)
    [ "$counted" -ge "$expected" ] || fail "too few"
    [ "$counted" -le $((expected * 102 / 100 + 20)) ] || fail "too many"
    [ "$counted" -le "$independent" ] || fail "more than there were"
done
echo 0 >$tracing/events/kprobes/enable
echo >$tracing/kprobe_events
says calls 'v["cause"] == "outer-fragmentation"'
# Per packet as the interface counts them: VXLAN of Linux 6.1 counts each twice.
says calls "any('cut up' in f['name'] and 0.95 < f['value'] * $packets / $sent < 1.05 for f in v['evidence'])"
cleanup
echo "ok: calls per packet"

echo "2. a doctor that is killed leaves no probe"
tunnel vxlan 1450
before=$(wc -l <$probes)
# Not by `near`, which would be a shell of its own.
nsenter --net=/run/netns/ka "$SEIKAN" doctor --iface ta --level 3 --seconds 60 >killed.log 2>&1 &
looking=$!
until_probed
kill -KILL $looking
wait $looking 2>/dev/null || true
for _ in $(seq 100); do [ "$(wc -l <$probes)" = "$before" ] && break; sleep 0.1; done
[ "$(wc -l <$probes)" = "$before" ] || fail "probes are left behind: $(cat $probes)"
cleanup
echo "ok: nothing is left behind"

for kind in wireguard vxlan; do
    echo "3. $kind"
    tunnel $kind 1420
    sink
    # Without being told which.
    near "$SEIKAN" doctor --map --json >map.json
    says map 'v["inner"] == "ta" and v["egress"] == "ua"'
    says map "any(l['name'] == 'ta' and l['kind'] == '$kind' for l in v['links'])"
    near "$SEIKAN" doctor --map
    datagrams 3000 1000 100 &
    pids+=($!)
    sleep 2
    doctor healthy --iface ta
    says healthy 'v["cause"] == "healthy" and v["throughput"] > 4e5'
    tc -n ka qdisc add dev ua root tbf rate 3mbit burst 16k latency 50ms
    stream
    sleep 4
    doctor shaped
    says shaped 'v["cause"] == "shaper"'
    cleanup
    echo "ok: $kind is found, healthy without a shaper, and its shaper is named"
done
echo "doctor-kernel: passed"
