#!/usr/bin/env bash
# Checks the dependency tree against the RustSec advisories.
#
#   scripts/advisories.sh                      fetches the database; where it cannot be reached, says so loudly and passes
#   ADVISORY_DB=DIR scripts/advisories.sh      uses the git clone in DIR instead (its age is still judged: 90 days at most)
#
# With SEIKAN_REQUIRE_ADVISORIES=1 an unreachable database is a failure: for machines that are known to reach it.
set -euo pipefail
cd "$(dirname "$0")/.."
url=https://github.com/RustSec/advisory-db

if [ -n "${ADVISORY_DB:-}" ]; then
    # cargo-deny clones with the git command, so git can be told where the database is.
    export GIT_CONFIG_COUNT=1 GIT_CONFIG_VALUE_0=$url
    GIT_CONFIG_KEY_0="url.file://$(realpath "$ADVISORY_DB").insteadOf"
    export GIT_CONFIG_KEY_0
    CARGO_HOME_DB=$(mktemp -d)
    trap 'rm -rf "$CARGO_HOME_DB"' EXIT
    sed "s#^\[advisories\]#&\ndb-path = \"$CARGO_HOME_DB\"#" deny.toml >"$CARGO_HOME_DB/deny.toml"
    cargo deny --all-features --config "$CARGO_HOME_DB/deny.toml" check --hide-inclusion-graph advisories
    exit
fi

if ! why=$(timeout 120 cargo deny --all-features fetch db 2>&1); then
    printf '%s\n' "$why" | tail -n 2 >&2
    message="SKIPPED: advisories NOT checked: the RustSec database cannot be fetched here; give a clone of it as ADVISORY_DB"
    echo "$message" >&2
    if [ "${SEIKAN_REQUIRE_ADVISORIES:-0}" = 1 ]; then exit 1; fi
    exit 0
fi
cargo deny --all-features --offline check --hide-inclusion-graph advisories
