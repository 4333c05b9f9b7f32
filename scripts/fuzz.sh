#!/usr/bin/env bash
# Runs the fuzz targets, as many at once as there are cores.
#
#   scripts/fuzz.sh [--asan] --each SECONDS [TARGET...]     time for each target [default: all]; optimised build
#   scripts/fuzz.sh [--asan] --total SECONDS [TARGET...]    time for all targets together, at least five seconds each; built from
#                                                           the dependencies of the tests
#
# Committed inputs (fuzz/corpus/TARGET) run first. New inputs are kept below the target directory of the build, not in the
# tree. A crashing input is written to fuzz/artifacts/TARGET; commit it to fuzz/corpus/TARGET with its fix.
#
# --asan rebuilds everything with AddressSanitizer, whose runtime comes with the compiler: our targets have no unsafe code, but
# their dependencies have.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${CARGO_TARGET_DIR:-$PWD/target} options=() folder=""
if [ "$1" = --asan ]; then
    host=$(rustc -vV | sed -n 's/^host: //p') folder=asan/$host/
    # The compiler's own flag, which a stable one takes only when told that it is known to change.
    export RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address
    # SQLite has static arrays of one name in two functions, which the check for the one definition rule takes for one.
    export ASAN_OPTIONS=detect_odr_violation=0
    options+=(--target "$host" --target-dir "$build/asan")
    shift
fi
mode=$1 seconds=$2
shift 2
cores=$(nproc)

targets=("$@")
[ ${#targets[@]} -gt 0 ] || for file in fuzz/fuzz_targets/*.rs; do
    [ "$file" = fuzz/fuzz_targets/main.rs ] || targets+=("$(basename "$file" .rs)")
done
if [ "$mode" = --total ]; then
    seconds=$((seconds * cores / ${#targets[@]}))
    [ "$seconds" -ge 5 ] || seconds=5
    profile=dev folder+=debug
else
    profile=fuzz folder+=fuzz
fi
# With --package, dependencies would have other features than those of the tests, and be built again.
RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/fuzz-rustc.sh cargo build --quiet --locked --workspace --bin fuzz --profile $profile "${options[@]}"
found=$build/fuzz-corpus binary=$build/$folder/fuzz

one() {
    local log=$found/$1.log
    mkdir -p "$found/$1" "fuzz/corpus/$1" "fuzz/artifacts/$1"
    if SEIKAN_FUZZ_TARGET=$1 "$binary" "$found/$1" "fuzz/corpus/$1" \
        -artifact_prefix="fuzz/artifacts/$1/" -max_total_time="$seconds" -max_len=65535 -rss_limit_mb=1024 -timeout=30 \
        -print_final_stats=1 >"$log" 2>&1; then
        printf '%-22s %s\n' "$1" "$(sed -nE 's/^#([0-9]+)\s+DONE +(cov: [0-9]+) .*/\1 runs, \2/p' "$log")"
    else
        printf '%s FAILED\n' "$1"
        grep -vE '^#' "$log" | tail -n 40
        return 1
    fi
}
export -f one
export seconds found binary
printf '%s\n' "${targets[@]}" | xargs -P "$cores" -I{} bash -c 'set -euo pipefail; one {}'
