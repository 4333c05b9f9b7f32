# Machines for the tests: `. machines.sh`.
#
#   boot NAME...        starts machines from copies of $base, all in one network: the first has 192.0.2.1, and so on
#   on NAME COMMAND     runs a shell command in one
#   modest NAME WHAT    asserts that an idle tunnel takes little memory there
#   halt                stops them and removes their files

log() { echo "== $*"; }
fail() { echo "$*" >&2; exit 1; }

# eventually SECONDS COMMAND...: waits until it succeeds
eventually() {
    local until=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $until ] || fail "not within time: $*"
        sleep 0.1
    done
}

boot() {
    local name number=0
    ip link add switch type bridge
    ip link set switch up
    for name; do
        number=$((number + 1))
        cp -a "$base" "$work/$name"
        echo "$name" >"$work/$name/etc/hostname"
        cp "$dist"/*_amd64.deb "$work/$name/root/"
        ip netns add "$name"
        ip link add "port-$name" type veth peer name eth0 netns "$name"
        ip link set "port-$name" master switch up
        ip -n "$name" link set lo up
        ip -n "$name" link set eth0 up
        ip -n "$name" address add "192.0.2.$number/24" dev eth0
        printf '192.0.2.%s %s.example.org %s\n' 1 "$1" "$1" 2 "${2:-none}" "${2:-none}" >>"$work/$name/etc/hosts"
        systemd-nspawn --quiet --directory "$work/$name" --machine "$name" --network-namespace-path="/run/netns/$name" \
            --bind=/dev/net/tun --capability=all --register=no --keep-unit --console=pipe --boot >"$work/$name.console" 2>&1 </dev/null &
        echo $! >"$work/$name.nspawn"
    done
    for name; do
        eventually 60 running "$name"
    done
}

init() { pgrep -P "$(cat "$work/$1.nspawn")" -f systemd; }

on() {
    local name=$1
    shift
    nsenter -t "$(init "$name")" -m -u -i -n -p -C -- env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive \
        bash -ec "$*"
}

# The daemon, not its monitor. No other process of the program may run there.
modest() {
    local bytes most=12000000
    # By then it has unmapped the code of its start.
    sleep 12
    bytes=$(on "$1" 'for pid in $(pgrep -x seikan); do cat "/proc/$pid/status"; done' | awk '/^VmRSS:/ && $2 > most { most = $2 } END { print most * 1024 }')
    echo "= $2: the larger of the two processes has $(python3 -c "print(f'{$bytes / 1e6:.1f}')") MB resident, of at most $((most / 1000000))"
    [ "$bytes" -gt 0 ] && [ "$bytes" -le $most ] || fail "more than $((most / 1000000)) MB resident"
}

running() { on "$1" 'systemctl is-system-running --wait || systemctl is-system-running | grep -q degraded'; }

halt() {
    local file name
    for file in "$work"/*.nspawn; do
        name=$(basename "${file%.nspawn}")
        kill -KILL "$(cat "$file")"
        wait "$(cat "$file")" 2>/dev/null || :
        ip link delete "port-$name"
        ip netns delete "$name"
        rm -f "$file"
        # Its last processes may still write.
        eventually 20 rm -rf --one-file-system "${work:?}/$name"
    done
    ip link delete switch
}
