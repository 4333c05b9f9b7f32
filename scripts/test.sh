#!/usr/bin/env bash
# Runs make targets in order and stops at the first failure.
#
#   scripts/test.sh STEP...
#
# Prints at the end the time of each step, the skipped tests with reasons, and the number of passed and failed tests.
set -uo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}
times=() failed=""
start=$SECONDS

for step in "$@"; do
    printf '\n== %s\n' "$step"
    begin=$SECONDS
    make --no-print-directory "$step" </dev/null 2>&1 | tee -a "$log/out" || failed=$step
    times+=("$(printf '%-12s %2d:%02d' "$step" $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60)))")
    [ -z "$failed" ] || break
done

printf '\n== minutes\n'
printf '%s\n' "${times[@]}"
printf '%-12s %2d:%02d\n' total $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60))
grep -h '^SKIPPED' "$log/out" | sort | uniq -c
[ -z "$failed" ] || printf 'FAILED: make %s\n' "$failed"

# Sums the last lines of all runners: "...: 3 passed, 0 failed", optionally ", 1 skipped".
sed -nE 's/.*: .*\b([0-9]+) passed, ([0-9]+) failed(, ([0-9]+) skipped)?.*/\1 \2 \4/p' "$log/out" |
    awk -v broken="${failed:+1}" '{ p += $1; f += $2; s += $3 } END { if (broken && !f) f = 1; printf "%d passed, %d failed, %d skipped\n", p, f, s }'
[ -z "$failed" ]
