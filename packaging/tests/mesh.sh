#!/usr/bin/env bash
# The units of the coordinator and the relay, and two members that join. The relay gets options and a port below 1024 by the drop-in
# of docs/reference/ports-and-files.md, and the coordinator a renewed certificate by the hook of docs/guides/coordinator.md. Its mesh
# moves as that page says.
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

# block PAGE HEADING LANGUAGE WORD: the block with this word below a heading
block() {
    python3 - "$@" <<'END'
import re, sys
page, heading, language, word = sys.argv[1:]
below = open(page).read().split(f"\n## {heading}\n")[1].split("\n## ")[0]
blocks = re.findall(rf"^```{language}\n(.*?)^```", below, re.M | re.S)
[found] = [text for text in blocks if word in text]
print(found, end="")
END
}
page=../../docs/reference/ports-and-files.md
dropin=$(block $page Services text 'tls-listen')
on hub "mkdir -p /etc/systemd/system/seikan-relay.service.d
    cat >/etc/systemd/system/seikan-relay.service.d/override.conf <<'END'
$dropin
END
    systemctl daemon-reload
    systemctl restart seikan-relay
    pgrep -u seikan-relay -x seikan
    [ \"\$(systemctl show -p NRestarts --value seikan-relay)\" = 0 ]"
eventually 10 on hub 'ss -Hltn "sport = :443" | grep LISTEN'
echo "= the drop-in of $(basename $page) gives the relay port 443"

# certbot calls the hook with the folder of the renewed certificate.
page=../../docs/guides/coordinator.md
as_root='sudo() { "$@"; }'
on hub "$as_root
$(block $page 'Users and directories' sh renewal-hooks)
    mkdir -p /root/live
    cp /var/lib/seikan-coordinator/tls.pem /root/live/fullchain.pem
    cp /var/lib/seikan-coordinator/tls.pem /root/live/privkey.pem
    RENEWED_LINEAGE=/root/live /etc/letsencrypt/renewal-hooks/deploy/seikan
    for file in fullchain privkey; do
        [ \"\$(stat -c '%a %G' /etc/seikan-coordinator/\$file.pem)\" = '640 seikan-coordinator' ]
        setpriv --reuid seikan-coordinator --regid seikan-coordinator --clear-groups cat /etc/seikan-coordinator/\$file.pem >/dev/null
    done"

# To another host: the same one without the directory, so that the name in the members' files stays.
as_user='sudo() { if [ "$1" = -u ]; then local user=$2; shift 2; setpriv --reuid "$user" --regid "$user" --clear-groups "$@"; else "$@"; fi; }'
on hub "$as_user
    cd /root
    sudo systemctl stop seikan-coordinator
    sudo -u seikan-coordinator seikan coordinator export /var/lib/seikan-coordinator/mesh.snapshot
    mv /var/lib/seikan-coordinator/mesh.snapshot /var/lib/seikan-coordinator/tls.pem /root/
    rm -r /var/lib/seikan-coordinator
$(block $page 'Back up and move a mesh' sh 'coordinator import')"
names() { on hub 'setpriv --reuid seikan-coordinator --regid seikan-coordinator --clear-groups \
    seikan coordinator members --dir /var/lib/seikan-coordinator --json' | python3 -c 'import json, sys; print(*sorted(m["name"] for m in json.load(sys.stdin)))'; }
[ "$(names)" = 'hub laptop' ] || fail "other members after the move: $(names)"
# The coordinator answers a member that joined before the move: a change of its key needs it.
eventually 60 on laptop 'seikan rotate-key'
eventually 30 on laptop "ping -c 1 -W 1 $address"
echo "= a mesh moves to an empty directory, and its members stay"
halt
