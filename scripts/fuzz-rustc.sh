#!/bin/sh
# A compiler of coverage for our own crates alone (RUSTC_WORKSPACE_WRAPPER): what they depend on is the build of everything else.
# The options are those of cargo-fuzz.
exec "$@" --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1
