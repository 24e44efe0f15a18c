# The device's own contract, and weights in its memory.
tap device_ops 120 ours "$build/tests/contract/test_contract_device_ops"
tap device_table 120 ours "$build/tests/unit/test_device_table"
if [ -x "$build/bench/bench_device" ]; then
    ours "$build/bench/bench_device" cuda 16384 >"$work/bench" 2>&1
    ok "bench_device runs" $?
    sed 's/^/# /' "$work/bench"
fi
