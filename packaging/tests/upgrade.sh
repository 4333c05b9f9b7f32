#!/usr/bin/env bash
# A newer package over an older one while traffic flows through a tunnel of each protocol: the daemons are replaced, and the
# sessions come back by themselves. $OLD is a folder with the packages of an earlier version; the host that is not upgraded keeps
# them, so that its tunnels are between both versions. Without $OLD, the older version is the one in $dist, and the newer
# version is the same with a higher number.
. ./machines.sh
. ./tunnel.sh
set -euo pipefail
boot office branch
for name in office branch; do
    mkdir "$work/$name/root/old"
    cp "${OLD:-$dist}"/seikan_*_amd64.deb "$work/$name/root/old/"
done
install_on() { on "$1" 'dpkg -i /root/old/seikan_*.deb'; }
tunnel office branch
# The same in the other protocol.
for name in office branch; do
    on $name 'umask 077
        cd /etc/seikan
        sed -e "1i protocol = \"wireguard\"" -e s/51820/51821/ -e s/10[.]9[.]0[.]/10.9.1./ tunnel.toml >wire.toml
        seikan check wire
        systemctl enable --now seikan@wire'
done
eventually 30 on office 'ping -c 1 -W 1 10.9.1.2'

[ -n "${OLD:-}" ] || on office 'rm /root/seikan_*.deb
    dpkg-deb -R /root/old/seikan_*.deb /root/newer
    sed -i "s/^Version: .*/Version: 999.0.0-1/" /root/newer/DEBIAN/control
    dpkg-deb -b /root/newer /root/seikan_999.deb'
daemons() { on office 'systemctl show -p MainPID --value seikan@tunnel seikan@wire' | grep .; }
version() { on office "dpkg-query -f '\${Version}' -W seikan"; }
old=$(daemons)
from=$(version)
count=500 interval=20 pings=()
for address in 10.9.0.1 10.9.1.1; do
    on branch "ping -i 0.0$interval -c $count -q $address" >"$work/pings.$address" &
    pings+=($!)
done
sleep 2
on office 'dpkg -i /root/seikan_*.deb'
[ -z "$(comm -12 <(sort <<<"$old") <(daemons | sort))" ] || fail "a daemon is the old one"
for job in "${pings[@]}"; do
    wait "$job" || fail "no ping came back: $(cat "$work"/pings.*)"
done
# The new daemon begins a handshake at once. If that is lost or refused, the next one is due after five seconds.
for address in 10.9.0.1 10.9.1.1; do
    lost=$((count - $(sed -n 's/.* \([0-9]*\) received.*/\1/p' "$work/pings.$address")))
    protocol=native
    [ $address = 10.9.0.1 ] || protocol=wireguard
    echo "= $protocol, from $from to $(version): $lost of $count pings lost, one every $interval ms: an outage of about $((lost * interval)) ms"
    [ $((lost * interval)) -le 500 ] || fail "an outage of more than 500 ms"
done
on office 'ping -c 1 -W 1 10.9.0.2
    ping -c 1 -W 1 10.9.1.2'
# Without sessions that were forged or packets that are missing without a reason.
for protocol in native wireguard; do
    file=tunnel
    [ $protocol = native ] || file=wire
    on branch "seikan status $file --json" | python3 -c '
import json, sys
status = json.load(sys.stdin)
status = status[0] if isinstance(status, list) else status
assert status["interface"]["protocol"] == sys.argv[1], status["interface"]
for direction in ("inbound", "outbound"):
    traffic = status["totals"][direction]
    assert traffic["unaccounted"] == 0, traffic
    drops = traffic["drops"]
    assert not any("auth" in reason or "forged" in reason for reason in drops), drops
    print("dropped", direction, drops)' $protocol
done
halt
