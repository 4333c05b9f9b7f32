#!/usr/bin/env bash
# Checks the dependency tree against the RustSec advisories.
#
#   scripts/advisories.sh                      fetches the database; if that fails, uses the snapshot in this tree and prints its
#                                              age; passes if no advisory applies
#   ADVISORY_DB=DIR scripts/advisories.sh      uses the git clone in DIR instead; it may be 90 days old at most
#   scripts/advisories.sh --snapshot DIR       rewrites the snapshot from the git clone in DIR: advisories on crates of Cargo.lock
#
# With SEIKAN_REQUIRE_ADVISORIES=1 an unreachable database is a failure, for machines that should reach it.
set -euo pipefail
cd "$(dirname "$0")/.."
url=https://github.com/RustSec/advisory-db
snapshot=$PWD/scripts/advisories

# check_with CLONE [AGE]: cargo-deny clones by the git command, which can be redirected to CLONE.
check_with() {
    local home
    home=$(mktemp -d)
    sed "s#^\[advisories\]#&\ndb-path = \"$home\"\nmaximum-db-staleness = \"${2:-P90D}\"#" deny.toml >"$home/deny.toml"
    local code=0
    GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="url.file://$1.insteadOf" GIT_CONFIG_VALUE_0=$url \
        cargo deny --all-features --config "$home/deny.toml" check --hide-inclusion-graph advisories || code=$?
    rm -rf "$home"
    return $code
}

if [ "${1:-}" = --snapshot ]; then
    clone=$(realpath "$2")
    rm -rf "$snapshot"
    mkdir -p "$snapshot"
    sed -n 's/^name = "\(.*\)"/\1/p' Cargo.lock | sort -u | while read -r crate; do
        git -C "$clone" archive HEAD "crates/$crate" 2>/dev/null | tar -x -C "$snapshot" 2>/dev/null || true
    done
    # Advisories are under a licence that requires attribution; a summary of ours would not comply.
    grep -rlZ '^license = "CC-BY' "$snapshot/crates" | xargs -0 -r rm -f || true
    find "$snapshot" -type d -empty -delete
    git -C "$clone" log -1 --format=%cI >"$snapshot/DATE"
    echo "$(find "$snapshot/crates" -type f | wc -l) advisories of $(cat "$snapshot/DATE")"
    exit
fi

if [ -n "${ADVISORY_DB:-}" ]; then
    check_with "$(realpath "$ADVISORY_DB")"
    exit
fi

if why=$(timeout 120 cargo deny --all-features fetch db 2>&1); then
    cargo deny --all-features --offline check --hide-inclusion-graph advisories
    exit
fi
printf '%s\n' "$why" | tail -n 2 >&2
date=$(cat "$snapshot/DATE")
days=$((($(date +%s) - $(date -d "$date" +%s)) / 86400))
echo "SKIPPED: advisories after ${date%T*}: the RustSec database cannot be fetched here, only its snapshot in this tree was judged, which is $days days old; give a clone as ADVISORY_DB" >&2
[ "${SEIKAN_REQUIRE_ADVISORIES:-0}" != 1 ] || exit 1
clone=$(mktemp -d)
trap 'rm -rf "$clone"' EXIT
cp -r "$snapshot/crates" "$clone/"
git -C "$clone" init -q -b main
git -C "$clone" add .
GIT_COMMITTER_DATE=$date git -C "$clone" -c user.name=snapshot -c user.email=snapshot@localhost commit -q --date "$date" -m snapshot
check_with "$clone" P100Y
