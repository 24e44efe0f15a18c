#!/bin/sh
# tests/fuzz/run.sh --seconds N [TARGET...]: every fuzz target (or those named) for N seconds each
# under libFuzzer with ASan and UBSan. New inputs go to build-fuzz/corpus; a finding stays in
# build-fuzz/crash-*.
set -u
cd "$(dirname "$0")/../.."
seconds=60
[ "${1:-}" = "--seconds" ] && { seconds=$2; shift 2; }
dir=build-fuzz
[ -f "$dir/build.ninja" ] || CC=clang meson setup "$dir" -Dfuzzing=true -Dwerror=false \
    -Db_sanitize=address,undefined -Db_lundef=false >"$dir.log" 2>&1 || { cat "$dir.log"; exit 1; }
rm -f "$dir.log"
targets=${*:-$(cd tests/fuzz && ls fuzz_*.c | sed 's/^fuzz_//; s/\.c$//')}
passed=0
failed=0
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export UBSAN_OPTIONS
for t in $targets; do
    ninja -C "$dir" "tests/fuzz/fuzz_$t" >"$dir/build.log" 2>&1 || { tail -20 "$dir/build.log"; exit 1; }
    mkdir -p "$dir/corpus/$t"
    if "$dir/tests/fuzz/fuzz_$t" -max_total_time="$seconds" -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$dir/crash-$t-" "$dir/corpus/$t" "tests/fuzz/corpus/$t" >"$dir/$t.log" 2>&1; then
        passed=$((passed + 1))
        echo "ok $t: $(grep -E 'number_of_executed_units' "$dir/$t.log" | tr -s ' ')"
    else
        failed=$((failed + 1))
        echo "not ok $t (replay: $dir/tests/fuzz/fuzz_$t $dir/crash-$t-*)"
        tail -15 "$dir/$t.log"
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
