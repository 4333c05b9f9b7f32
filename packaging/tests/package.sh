#!/usr/bin/env bash
# From the package file to the first encrypted ping, on two machines, as docs/getting-started/tunnel.md says.
. ./machines.sh
. ./tunnel.sh
set -euo pipefail
lintian --fail-on error,warning "$dist"/*.deb
rpm --checksig --nosignature "$dist"/*.rpm
rpm -qpl "$dist"/seikan-[0-9]*.rpm | grep -x /usr/lib/systemd/system/seikan@.service >/dev/null

boot office branch
began=$(date +%s.%N)
# As docs/getting-started/install.md says; without a network, so without the recommended packages.
on office 'apt-get install -y --no-install-recommends /root/seikan_*.deb'
tunnel office branch
python3 -c "print(f'= first encrypted ping after {$(date +%s.%N) - $began:.1f} s, both hosts installed one after the other')"
[ "$(python3 -c "print(int($(date +%s.%N) - $began < 60))")" = 1 ] || fail "more than 60 s"

# Users, directories and rights.
on office '
    [ "$(stat -c %a /etc/seikan)" = 700 ]
    [ "$(stat -c %a /etc/seikan/tunnel.key)" = 600 ]
    id seikan
    id seikan-coordinator
    id seikan-relay
    pgrep -u seikan -x seikan
    seikan status | grep -q branch
    journalctl -u seikan@tunnel | grep -qi started
    man -w seikan-up 2>/dev/null || [ -e /usr/share/man/man1/seikan-up.1.gz ] || grep -qs man /etc/dpkg/dpkg.cfg.d/*'
# What is printed fits the schema that is installed.
on office 'cat /usr/share/seikan/schemas/status.json' >"$work/status.schema.json"
on office 'seikan status --json' >"$work/status.json"
"$validators/bin/check-jsonschema" --schemafile "$work/status.schema.json" "$work/status.json"
# A changed file is applied without a restart.
on office '
    before=$(systemctl show -p MainPID --value seikan@tunnel)
    printf "\n[[peer]]\nname = \"third\"\npublic-key = \"%s\"\nallowed-ips = \"10.9.0.3/32\"\n" "$(seikan genkey | seikan pubkey)" \
        >>/etc/seikan/tunnel.toml
    systemctl reload seikan@tunnel
    [ "$(seikan status tunnel | grep -c "^peer:")" = 2 ]
    [ "$before" = "$(systemctl show -p MainPID --value seikan@tunnel)" ]'
# A faulty configuration is not tried again and again; a fault that may pass is.
on office '
    restarts() { systemctl show -p NRestarts --value "$1"; }
    echo "mtu = 1" >/etc/seikan/faulty.toml
    if systemctl start seikan@faulty; then exit 1; fi
    sed "s/10.9.0./10.9.1./" /etc/seikan/tunnel.toml >/etc/seikan/taken.toml
    systemctl start --no-block seikan@taken
    for _ in {1..100}; do [ "$(restarts seikan@taken)" = 0 ] || break; sleep 0.1; done
    [ "$(restarts seikan@taken)" -gt 0 ]
    systemctl stop seikan@taken
    [ "$(systemctl is-failed seikan@faulty)" = failed ]
    [ "$(restarts seikan@faulty)" = 0 ]'

modest office 'an idle tunnel'

# Both packages, as README.md says, and the demo. Only where a machine of the test can have hosts of its own.
on office 'apt-get purge -y seikan
    cd /root
    apt-get install -y --no-install-recommends ./seikan_*.deb ./seikan-lab_*.deb
    seikan-lab --version'
if on office '[ -c /dev/net/tun ] && unshare --net ip link add left type veth peer name right'; then
    # systemd-nspawn has it mounted read-only. The demo sets parameters of its own hosts there.
    on office 'mount -o remount,bind,rw /proc/sys'
    before=$(on office 'ip -o link; ip rule; ls /run')
    on office 'seikan demo --seconds 1 --json' >"$work/demo.json" || log "the demo ended with a status other than 0"
    [ "$(on office 'ip -o link; ip rule; ls /run')" = "$before" ] || fail "the demo left something behind"
    python3 - "$work/demo.json" <<'END'
import json, sys
demo = json.load(open(sys.argv[1]))
rows = {row["name"]: row for row in demo["rows"]}
assert set(rows) == {"raw", "seikan-native", "seikan-wireguard", "seikan-gateway"}, set(rows)
for name, row in rows.items():
    assert row["error"] is None and row["forward_gbit_per_second"] > 0, (name, row["error"])
print("= the demo, in Gbit/s:", ", ".join(f"{name} {row['forward_gbit_per_second']:.2f}" for name, row in rows.items()))
problem = demo["doctor_error"]
# Its part needs a machine that keeps up with a stream.
assert problem is None or "while the machine has less to do" in problem, problem
print("=", f"SKIPPED the demo's doctor: {problem}" if problem else f"the demo's doctor: {demo['doctor']['sentence']}")
END
else
    echo "= SKIPPED the demo: a machine has no namespaces of its own, or no /dev/net/tun"
fi
halt
