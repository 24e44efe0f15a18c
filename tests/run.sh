#!/bin/sh
# tests/run.sh BUILD [--quick|--full]: runs the suites of one size and prints "N passed, N failed".
#   --quick  unit and contract tests
#   plain    those, the small models, the cluster tests, and unit and contract tests once more under
#            ASan and UBSan
#   --full   everything, the slow cluster tests and TSan too
set -u
build=$1
size=${2:-}
cd "$(dirname "$0")/.."
passed=0
failed=0

# run_suite LABEL BUILD_DIR meson-arguments...: adds to passed and failed.
run_suite() {
    label=$1
    dir=$2
    shift 2
    start=$(date +%s)
    log="$dir/meson-logs/testlog-$label.txt"
    meson test -C "$dir" --no-rebuild --print-errorlogs --logbase "testlog-$label" "$@"
    # TAP tests count each of their cases; others (and those that died) count as one.
    counts=$(awk '
        /^=+ [0-9]+\/[0-9]+ =+$/ { flush_test(); ok = notok = 0; result = "" }
        /^ok [0-9]+/ { ok++ }
        /^not ok [0-9]+/ { notok++ }
        /^result: / { result = $0 }
        function flush_test() {
            if (result == "") return
            good = (result ~ /exit status 0/ || result ~ /returned 0/) 
            p += ok; f += notok
            if (good && ok + notok == 0) p++
            if (!good && notok == 0) f++
        }
        END { flush_test(); print p + 0, f + 0 }' "$log")
    p=${counts% *}
    f=${counts#* }
    passed=$((passed + p))
    failed=$((failed + f))
    grep -h '# SKIP' "$log" | sort -u | sed 's/^/skipped: /'
    echo "$label: $p passed, $f failed, $(($(date +%s) - start)) s"
}

configure() {
    dir=$1
    shift
    [ -f "$dir/build.ninja" ] || meson setup "$dir" "$@" >"$dir.log" 2>&1 || { cat "$dir.log"; exit 1; }
    rm -f "$dir.log"
    ninja -C "$dir" >"$dir/build.log" 2>&1 || { grep -E -A5 'error|FAILED' "$dir/build.log"; exit 1; }
}

run_suite quick "$build" --suite unit --suite contract --suite lint
if [ "$size" != "--quick" ]; then
    run_suite model "$build" --suite model
    run_suite cluster "$build" --suite cluster --num-processes 1
    # filled with a pattern, so that what is read before it is written shows
    configure "$build-asan" -Db_sanitize=address,undefined -Db_lundef=false -Dwerror=false \
        -Dc_args=-ftrivial-auto-var-init=pattern
    export CK_TIMEOUT_MULTIPLIER=5
    run_suite asan "$build-asan" --suite unit --suite contract --timeout-multiplier 4
fi
if [ "$size" = "--full" ]; then
    run_suite slow "$build" --suite slow --num-processes 1
    configure "$build-tsan" -Db_sanitize=thread -Db_lundef=false -Dwerror=false
    TSAN_OPTIONS="suppressions=$PWD/tests/tsan.supp halt_on_error=1 second_deadlock_stack=1"
    CK_TIMEOUT_MULTIPLIER=10
    export TSAN_OPTIONS CK_TIMEOUT_MULTIPLIER
    # what has threads; docs/SANITIZERS.md
    run_suite tsan "$build-tsan" --timeout-multiplier 10 port_zmq contract_port coordinator_io \
        loop mesh api_http contract_executor cpuexec_fixtures cpuexec_invariance cpuexec_ep \
        contract_weight_transfer_engine device_table nccl tcpstore rpc trainer trainer_nccl
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
