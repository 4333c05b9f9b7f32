#!/usr/bin/env bash
# The units of the coordinator and the relay, and two members that join.
. ./machines.sh
set -euo pipefail
boot hub laptop
for name in hub laptop; do on $name 'dpkg -i /root/seikan_*.deb'; done
on hub 'systemctl enable --now seikan-coordinator seikan-relay'
on hub '
    pgrep -u seikan-coordinator -x seikan
    pgrep -u seikan-relay -x seikan
    [ "$(stat -c "%a %U" /var/lib/seikan-coordinator)" = "700 seikan-coordinator" ]'
join=$(on hub 'setpriv --reuid seikan-coordinator --regid seikan-coordinator --clear-groups \
    seikan coordinator token --dir /var/lib/seikan-coordinator --reusable --host hub.example.org' | grep -o 'seikan join .*')
on laptop "$join"
on hub "$join"
address=$(on hub 'ip -4 -o address show seikan0' | sed -n 's|.*inet \([0-9.]*\)/.*|\1|p')
eventually 30 on laptop "ping -c 1 -W 1 $address"
on laptop 'seikan status'
modest laptop 'an idle member'
halt
