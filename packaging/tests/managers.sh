#!/usr/bin/env bash
# systemd-networkd leaves a tunnel alone: it adds nothing, and address, routes and rules stay when it starts.
. ./machines.sh
. ./tunnel.sh
set -euo pipefail
boot office branch
tunnel office branch seikan0 0.0.0.0/0
settings() { on office 'ip rule; ip route show table all dev seikan0; ip address show seikan0'; }
# It may need several tries: in a container its socket's buffers are small.
start_networkd() {
    on office 'systemctl stop systemd-networkd'
    eventually 30 on office 'systemctl start systemd-networkd'
    eventually 10 on office 'networkctl list --no-pager --no-legend | grep seikan0 | grep -v pending'
}

# A file that matches every interface.
on office 'printf "[Match]\nName=*\n[Network]\nAddress=192.0.2.1/24\nKeepConfiguration=no\n" >/etc/systemd/network/90-all.network'
before=$(settings)
start_networkd
on office 'networkctl list --no-pager --no-legend' | grep 'seikan0 .*unmanaged' >/dev/null
sleep 1
[ "$(settings)" = "$before" ] || fail "changed: $(diff <(echo "$before") <(settings))"
on office 'seikan status seikan0 --json' | python3 -c '
import json, sys
status = json.load(sys.stdin)
restored = (status[0] if isinstance(status, list) else status)["interface"]["restored"]["count"]
assert restored == 0, restored'
echo "= networkd with a file for every interface changes nothing"

# Without the files of the package it configures the tunnel as its own.
on office 'mkdir -p /etc/systemd/networkd.conf.d
    ln -s /dev/null /etc/systemd/networkd.conf.d/10-seikan.conf
    ln -s /dev/null /etc/systemd/network/10-seikan.network'
start_networkd
eventually 10 on office 'ip address show seikan0 | grep -q 192.0.2.1'
echo "= without the files of the package it adds an address to the tunnel"
halt
