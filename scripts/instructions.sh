#!/usr/bin/env bash
# Counts the instructions that a packet takes through two tunnels without sockets, by callgrind: the sender and the receiver
# together, with encryption. Handshakes cancel out: the count of 20 batches is subtracted from that of 120.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
install_missing valgrind:valgrind

built=$(cargo bench --locked -p seikan-proto --bench packets --no-run --message-format json)
program=$(python3 -c '
import json, sys
for line in sys.stdin:
    unit = json.loads(line)
    if unit.get("executable") and unit["target"]["name"] == "packets":
        print(unit["executable"])' <<<"$built")

# Prints the packets and the instructions of a run.
run() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$program" "$@" 2>&1 | awk '/^[0-9]+$/ {p = $1} /Collected/ {i = $NF} END {print p, i}'
}

for protocol in native wireguard; do
    for kind in udp tcp; do
        read -r few_packets few < <(run $protocol $kind 20)
        read -r packets all < <(run $protocol $kind 120)
        printf '%-10s %-4s %6d instructions per packet\n' $protocol $kind $(((all - few) / (packets - few_packets)))
    done
done
