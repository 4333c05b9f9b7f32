#!/usr/bin/env bash
# A newer package over an older one while traffic flows: the daemon is replaced, and the session comes back by itself.
. ./machines.sh
. ./tunnel.sh
set -euo pipefail
boot office branch
tunnel office branch
newer() { # HOST: the same package with a newer version
    on "$1" 'dpkg-deb -R /root/seikan_*.deb /root/newer
        sed -i "s/^Version: .*/Version: 999.0.0-1/" /root/newer/DEBIAN/control
        dpkg-deb -b /root/newer /root/newer.deb'
}
newer office
old=$(on office 'systemctl show -p MainPID --value seikan@tunnel')
on branch 'ping -i 0.02 -c 500 -q 10.9.0.1' >"$work/pings" &
pings=$!
sleep 2
on office 'dpkg -i /root/newer.deb'
new=$(on office 'systemctl show -p MainPID --value seikan@tunnel')
[ "$old" != "$new" ] || fail "the daemon is the old one"
wait $pings || fail "no ping came back: $(cat "$work/pings")"
received=$(sed -n 's/.* \([0-9]*\) received.*/\1/p' "$work/pings")
echo "= $((500 - received)) of 500 pings lost, one every 20 ms: an outage of about $(((500 - received) * 20)) ms"
[ $((500 - received)) -lt 150 ] || fail "an outage of more than 3 s"
on office 'ping -c 1 -W 1 10.9.0.2'
# Without sessions that were forged or packets that are missing without a reason.
on branch 'seikan status --json' | python3 -c '
import json, sys
status = json.load(sys.stdin)
status = status[0] if isinstance(status, list) else status
for direction in ("inbound", "outbound"):
    traffic = status["totals"][direction]
    assert traffic["unaccounted"] == 0, traffic
    drops = traffic["drops"]
    assert not any("auth" in reason or "forged" in reason for reason in drops), drops
    print("dropped", direction, drops)'
halt
