#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER that instruments only this workspace's crates, so that their dependencies are built once for all targets.
# The options are those of cargo-fuzz.
exec "$@" --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1
