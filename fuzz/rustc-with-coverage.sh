#!/bin/sh
# Cargo's RUSTC_WORKSPACE_WRAPPER for `cargo xtask fuzz`: compiles the crates of this workspace so that libFuzzer sees which
# way they take, with arithmetic checked. The flags are cargo-fuzz's for `--sanitizer none`. Dependencies stay as they are: the
# WebAssembly runtime would take many times as long to build, and inputs would be chosen for the ways they take there.
exec "$@" \
    -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Cllvm-args=-simplifycfg-branch-fold-threshold=0 \
    -Cdebug-assertions -Coverflow-checks
