#!/usr/bin/env bash
# The tests of `scripts/dist-check.sh` and `scripts/openwrt-check.sh`, which set $base (a Debian root with systemd), $dist (the
# packages) and $work, and give namespaces that end with this script.
set -euo pipefail
cd "$(dirname "$0")"
mount --make-rprivate /
# Others may not change it: the coordinator refuses such a place.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /dev/net
ip link set lo up
. ./machines.sh

tests=(workflow archive aarch64 manifests rpm package upgrade removal mesh managers image)
[ $# = 0 ] || tests=("$@")
for test in "${tests[@]}"; do
    began=$SECONDS
    # Two tests may use the same file names.
    mkdir -p "$work/$test"
    if ! (work=$work/$test "./$test.sh") >"$work/$test.log" 2>&1; then
        cat "$work/$test.log" >&2
        echo "FAILED: $test" >&2
        exit 1
    fi
    grep -h '^=' "$work/$test.log" | sed "s/^= /$test: /" || :
    printf '%s: passed in %d s\n' "$test" $((SECONDS - began))
done
