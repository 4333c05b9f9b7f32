#!/usr/bin/env bash
# A newer package over an older one while traffic flows through a tunnel of each protocol: the daemons are replaced, and the
# sessions come back by themselves. $OLD is a folder with the packages of an earlier version; the host that is not upgraded keeps
# them, so that its tunnels are between both versions. Without $OLD, the older version is the one in $dist, and the newer
# version is the same with a higher number. A coordinator is upgraded too, and goes back to the version before.
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
# A mesh: the coordinator is on the host that is upgraded, its only member on the other.
admin='setpriv --reuid seikan-coordinator --regid seikan-coordinator --clear-groups seikan coordinator'
on office 'systemctl enable --now seikan-coordinator'
join=$(on office "$admin token --dir /var/lib/seikan-coordinator --reusable --host office.example.org" | grep -o 'seikan join .*')
on branch "$join"
connected() { on branch 'seikan status seikan0 --json' | grep '"contact": *"connected"' >/dev/null; }
disconnected() { ! connected; }
members() { on office "$admin members --dir /var/lib/seikan-coordinator --json" | python3 -c 'import json, sys; print(*sorted(m["name"] for m in json.load(sys.stdin)))'; }
eventually 30 connected

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

# The coordinator goes on with its member. If the newer version has no other schema, later_version.py changes the file as a
# version with another schema does. The log of the killed process must not get into the copy.
eventually 30 connected
[ "$(members)" = branch ] || fail "the coordinator has other members after the upgrade: $(members)"
database=$work/office/var/lib/seikan-coordinator/mesh.db
if ! ls "$database".schema* 2>/dev/null; then
    on office 'systemctl stop seikan-coordinator'
    python3 later_version.py upgrade "$database"
    on office 'systemctl reset-failed seikan-coordinator
        if systemctl start seikan-coordinator; then exit 1; fi
        systemctl stop seikan-coordinator
        journalctl -u seikan-coordinator | grep "a later version of seikan"'
    python3 later_version.py kill "$database"
    [ -s "$database-wal" ]
    eventually 60 disconnected
fi
copies=("$database".schema*)
[ ${#copies[@]} = 1 ] || fail "more than one copy: ${copies[*]}"
copy=$(basename "${copies[0]}")
# The commands of that page, as a reader copies them, with the names of here. The machine has no sudo and its user is root.
page=../../docs/reference/compatibility.md
commands=$(sed -n '/^## Back to the version before/,/^## [^B]/ { /^```sh/,/^```$/ { /^```/! p } }' $page |
    sed -e "s/mesh\.db\.schema[0-9]*/$copy/" -e 's|\./seikan_[^ ]*_amd64\.deb|/root/old/seikan_*.deb|')
for part in 'systemctl stop' 'rm -f' "$copy" 'apt install --allow-downgrades /root/old/' 'systemctl start'; do
    [[ $commands == *"$part"* ]] || fail "$page no longer has the command: $part"
done
on office "sudo() { \"\$@\"; }
    apt() { command apt-get -y --no-install-recommends \"\$@\"; }
    systemctl reset-failed seikan-coordinator
    $commands"
[ "$(version)" = "$from" ] || fail "the version is $(version), not $from"
[ "$(members)" = branch ] || fail "the restored coordinator has other members: $(members)"
eventually 60 connected
# The member hears of a new one from it.
on office "$join"
eventually 60 on branch 'seikan ping --iface seikan0 -c 1 office'
echo "= a coordinator goes back from its upgraded file to $copy, and its member finds it"
halt
