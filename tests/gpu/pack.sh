#!/bin/sh
# pack.sh BUILD OUT [PROGRAM...]: what tests/gpu/run.sh needs of a build, with the libraries beyond
# the C library that it links to, for a machine that has none of them. A PROGRAM is a path in BUILD.
set -eu
build=$(cd "$1" && pwd)
rm -rf "$2"
mkdir -p "$2/lib"
out=$(cd "$2" && pwd)
shift 2
cd "$build"
# Of the machine that runs it: the C and C++ runtimes must fit what else is loaded there.
own='/(ld-linux[^/]*|libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s)\.so'

for program in deploy/tool/lockstep-tool coordinator/lockstep-coordinator api_frontend/lockstep-api \
    engine_core/lockstep-engine transfer/transfer_*.so transfer/trainer/liblockstep_trainer.so \
    examples/push_weights tests/contract/test_contract_device_ops tests/unit/test_device_table \
    tests/gpu/test_gpu_* tests/gpu/count_allocations.so \
    bench/bench_device bench/bench_nccl* "$@"; do
    [ -f "$program" ] || continue
    mkdir -p "$out/$(dirname "$program")"
    strip -o "$out/$program" "$program"
    ldd "$program" | awk '$3 ~ /^\// {print $3}'
done | sort -u | grep -Ev "$own" | while read -r library; do
    cp -L "$library" "$out/lib/"
    strip --strip-unneeded "$out/lib/$(basename "$library")" 2>/dev/null || true
done
chmod -R u+w "$out"
du -sh "$out"
