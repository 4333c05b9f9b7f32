#!/usr/bin/env bash
# Runs the fuzz targets, as many at once as there are cores.
#
#   scripts/fuzz.sh --each SECONDS [TARGET...]     that long for each target, all of them unless named
#   scripts/fuzz.sh --total SECONDS [TARGET...]    that long on the clock for all of them together, five seconds each at least
#
# Every committed input (fuzz/corpus/TARGET) is run first. What is found new is kept under the target folder of the
# build, not in the tree; a crashing input lands in fuzz/artifacts/TARGET and belongs into fuzz/corpus/TARGET with its fix.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=$1 seconds=$2
shift 2
cores=$(nproc)
# No sanitizer: unsafe code lives in `sys`, which has no target, and without one the stable compiler is enough.
options=(--sanitizer none)
# Its own folder: cargo-fuzz builds everything anew with coverage.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/fuzz

targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cargo fuzz list)
if [ "$mode" = --total ]; then
    seconds=$((seconds * cores / ${#targets[@]}))
    [ "$seconds" -ge 5 ] || seconds=5
fi
if ! output=$(cargo fuzz build "${options[@]}" 2>&1); then
    printf '%s\n' "$output"
    exit 1
fi

one() {
    local target=$1 found=$CARGO_TARGET_DIR/corpus/$1 log=$CARGO_TARGET_DIR/$1.log
    mkdir -p "$found" "fuzz/corpus/$target" "fuzz/artifacts/$target"
    if "$CARGO_TARGET_DIR/$(rustc -vV | sed -n 's/^host: //p')/release/$target" "$found" "fuzz/corpus/$target" \
        -artifact_prefix="fuzz/artifacts/$target/" -max_total_time="$seconds" -max_len=9000 -rss_limit_mb=1024 -timeout=30 \
        -print_final_stats=1 >"$log" 2>&1; then
        printf '%-22s %s\n' "$target" "$(sed -nE 's/^#([0-9]+)\s+DONE +(cov: [0-9]+) .*/\1 runs, \2/p' "$log")"
    else
        printf '%s FAILED\n' "$target"
        grep -vE '^#' "$log" | tail -n 40
        return 1
    fi
}
export -f one
export seconds
printf '%s\n' "${targets[@]}" | xargs -P "$cores" -I{} bash -c 'set -euo pipefail; one {}'
