#!/bin/bash
# bench.sh [BUILD]: the figures of weight updates between GPUs, one after the other in one run. BUILD
# is a build directory, or what pack.sh made of one (default: build). With two GPUs, for the tensors
# of a 0.6B model and of Qwen3-8B: the raw ncclBroadcast, whole updates with digests off and on, and
# the packed torch loop beside them. With four or eight, also three or seven ranks for Qwen3-8B and
# Qwen3-30B-A3B, of which one is killed at last. With one GPU or more: bench/ipc_update.py. Under six
# minutes with two GPUs.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$root/build}" && pwd) || exit 2
export LK_BUILD_DIR=$build PYTHONUNBUFFERED=1
bad=0

# step SECONDS COMMAND...
step() {
    local seconds=$1 started=$SECONDS status
    shift
    echo "== $*"
    timeout "$seconds" "$@" 2>&1
    status=$?
    echo "== exit status $status, $((SECONDS - started)) s"
    [ "$status" -eq 0 ] || bad=$((bad + 1))
}

ours() {
    step "$1" env "LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "${@:2}"
}

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
[ "$gpus" -gt 0 ] || gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)
echo "$(date -u +%F), $gpus GPUs: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)"
if [ "$gpus" -ge 2 ]; then
    nccl=$(python3 "$here/nccl_torch.py" --find-nccl) || exit 1
    update() {
        ours 150 "$build/bench/bench_nccl_update" "$@" --nccl-library "$nccl"
    }
    update qwen3-0.6b
    step 60 python3 "$root/bench/torch_packed_loop.py" qwen3-0.6b
    update qwen3-0.6b --packed $((1 << 30))
    update qwen3-0.6b --updates 5 --timings
    update qwen3-8b
    step 100 python3 "$root/bench/torch_packed_loop.py" qwen3-8b
    update qwen3-8b --updates 5 --timings
    for ranks in 3 7; do
        [ "$gpus" -gt "$ranks" ] || continue
        for model in qwen3-8b qwen3-30b-a3b; do
            ours 600 "$build/bench/bench_nccl_update" $model --ranks $ranks --updates 20 --digests on \
                --kill --nccl-library "$nccl"
        done
    done
else
    echo "NCCL needs two GPUs"
fi
ours 120 python3 "$root/bench/ipc_update.py"
echo "$bad steps failed, $SECONDS s"
[ "$bad" -eq 0 ]
