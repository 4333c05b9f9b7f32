#!/usr/bin/env bash
# Checks packaging/prometheus and packaging/grafana with the programs that read them. Those of Debian's package `prometheus`
# are unpacked and not installed, so that no service starts.
#
#   scripts/monitoring-check.sh rules   promtool checks and tests the alerts; two seconds
#   scripts/monitoring-check.sh         the same; then a Prometheus evaluates all alerts and all queries of the dashboard, with
#                                       the metrics of two members of a mesh, of a gateway and of a relay (root; half a minute)
#
# The hosts are namespaces, which end with the script, and so do their processes and files.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
: "${TOOLS:=${CARGO_HOME:-$HOME/.cargo}/seikan-tools}"
export PATH=$PATH:$TOOLS/prometheus

main() {
    install_prometheus
    promtool check rules packaging/prometheus/seikan.rules.yaml
    promtool test rules packaging/prometheus/seikan.rules.test.yaml
    [ "${1:-}" != rules ] || exit 0

    [ "$(id -u)" = 0 ] || { echo "namespaces need root" >&2; exit 1; }
    install_missing ip:iproute2 ping:iputils-ping iperf3:iperf3 python3:python3 unshare:util-linux
    [ -n "${SEIKAN_BIN:-}" ] || cargo build --locked -p seikan-cli
    seikan=$(realpath "${SEIKAN_BIN:-${CARGO_TARGET_DIR:-target}/debug/seikan}")
    work=$(mktemp -d)
    trap 'rm -rf --one-file-system "$work"' EXIT
    # The daemons run as another user.
    chmod 755 "$work"
    export seikan work
    unshare --mount --net --pid --fork --kill-child --mount-proc scripts/monitoring-check.sh inside
}

# Once per machine.
install_prometheus() (
    ! command -v prometheus >/dev/null || ! command -v promtool >/dev/null || exit 0
    echo "unpacking Debian's prometheus"
    dir=$(mktemp -d)
    trap 'rm -rf "$dir"' EXIT
    cd "$dir"
    download() { apt-get -o APT::Sandbox::User=root download -q prometheus >/dev/null; }
    # The lists of packages may be old or missing.
    download 2>/dev/null || { apt-get update -q >/dev/null && download; } || {
        echo "cannot download Debian's package prometheus: run \`apt-get update\` as root, then this again" >&2
        exit 1
    }
    dpkg-deb -x prometheus_*.deb root
    mkdir -p "$TOOLS/prometheus"
    install "$dir"/root/usr/bin/prometheus "$dir"/root/usr/bin/promtool "$TOOLS/prometheus/"
)

# In namespaces of their own.
inside() {
    local resolver
    mount --make-rprivate /
    # Often a link into /run, which is covered here.
    resolver=$(realpath -m /etc/resolv.conf)
    cat /etc/resolv.conf >"$work/resolv.conf" 2>/dev/null || true
    mount -t tmpfs tmpfs /run
    mkdir /run/netns
    [ -e "$resolver" ] || { mkdir -p "${resolver%/*}" && touch "$resolver"; }
    mount --bind "$work/resolv.conf" "$resolver"
    export SEIKAN_STATE_DIR=$work/state
    make_network
    start_mesh
    start_traffic
    start_prometheus
    on office python3 scripts/dashboard_queries.py http://127.0.0.1:9090 packaging/grafana/seikan.json
}

# office and branch have a network with the coordinator and the relay; plc is a device on the LAN of office.
make_network() {
    local host number=10
    ip link set lo up
    ip link add switch type bridge
    ip address add 192.0.2.1/24 dev switch
    ip link set switch up
    for host in office branch; do
        number=$((number + 1))
        ip netns add $host
        ip link add "port-$host" type veth peer name eth0 netns $host
        ip link set "port-$host" master switch up
        ip -n $host address add 192.0.2.$number/24 dev eth0
        ip -n $host link set lo up
        ip -n $host link set eth0 up
    done
    ip netns add plc
    ip link add eth1 netns office type veth peer name eth0 netns plc
    ip -n office link set eth1 up
    ip -n plc address add 192.168.1.10/24 dev eth0
    ip -n plc link set eth0 up
    ip -n plc route add 100.80.0.0/12 dev eth0
}

start_mesh() {
    local host join
    run coordinator "$seikan" coordinator --dir "$work/coordinator" --listen 192.0.2.1:7443
    run relay "$seikan" relay --dir "$work/relay" --listen 192.0.2.1:3478 --metrics 192.0.2.1:9587
    eventually grep -q listens "$work/coordinator.log"
    join=$("$seikan" coordinator token --dir "$work/coordinator" --reusable --devices --host 192.0.2.1 | grep -o 'join https.*')
    for host in office branch; do
        # shellcheck disable=SC2086
        on $host "$seikan" $join --name $host --iface "$work/$host.toml" --no-up >/dev/null
    done
    cat >>"$work/office.toml" <<'END'

[gateway]
interface = "eth1"

[[gateway.device]]
name = "plc"
lan = "192.168.1.10"
END
    run office on office "$seikan" up "$work/office.toml" --metrics 127.0.0.1:9586
    run branch on branch "$seikan" up "$work/branch.toml" --metrics 192.0.2.12:9586
    office=$(mesh_address office) branch=$(mesh_address branch)
    eventually on branch ping -c 1 -W 1 "$office"
    eventually device_address
    eventually on branch ping -c 1 -W 1 "$(device_address)"
}

mesh_address() { sed -nE 's|^address = \["([0-9.]+)/.*|\1|p' "$work/$1.toml"; }
device_address() { "$seikan" coordinator devices --dir "$work/coordinator" | grep -oE '100\.[0-9.]+'; }

# Packets that arrive, and some that are dropped.
start_traffic() {
    run ping on branch ping -q -i 0.01 -s 1000 "$office"
    run no-route on branch ping -q -i 0.1 "${office%.*}.99"
    run plc-server on plc iperf3 --server
    run plc-client on branch iperf3 --client "$(device_address)" --bitrate 5M --time 600
    run strangers bash -c 'while sleep 0.1; do echo hello >/dev/udp/192.0.2.1/3478; done'
}

start_prometheus() {
    cat >"$work/prometheus.yml" <<END
global: {scrape_interval: 1s, evaluation_interval: 2s}
rule_files: ["$PWD/packaging/prometheus/seikan.rules.yaml"]
scrape_configs:
  - job_name: seikan
    static_configs:
      - {targets: ["127.0.0.1:9586"], labels: {instance: office}}
      - {targets: ["192.0.2.12:9586"], labels: {instance: branch}}
  - job_name: seikan-relay
    static_configs:
      - {targets: ["192.0.2.1:9587"], labels: {instance: relay}}
END
    run prometheus on office prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/tsdb" \
        --web.listen-address=127.0.0.1:9090
}

on() { ip netns exec "$@"; }

# run NAME COMMAND...: in the background, with a log
run() {
    local name=$1
    shift
    "$@" >"$work/$name.log" 2>&1 </dev/null &
}

# Waits until a command succeeds. Shows all logs if it does not.
eventually() {
    local until=$((SECONDS + 60))
    until "$@" >/dev/null 2>&1; do
        if [ $SECONDS -ge $until ]; then
            tail -n 5 "$work"/*.log >&2
            echo "not within time: $*" >&2
            exit 1
        fi
        sleep 0.2
    done
}

if [ "${1:-}" = inside ]; then inside; else main "$@"; fi
