# NCCL between two GPUs: both halves in one process over the real library; a cluster fed by our C
# trainer; a cluster fed by PyTorch, and what becomes of it when that trainer dies.
if [ "$gpus" -lt 2 ]; then
    note "NCCL needs two GPUs"
else
    nccl=$(python3 "$here/nccl_torch.py" --find-nccl)
    CK_FORK=no LK_TEST_NCCL_LIBRARY=$nccl tap nccl_pair 150 ours "$build/tests/gpu/test_gpu_nccl"
    for how in "" --unpacked --store; do
        ours "$build/bench/bench_nccl_update" tiny --updates 3 --nccl-library "$nccl" $how \
            >"$work/bench" 2>&1
        ok "a C trainer feeds a cluster ${how:-packed}" $?
        sed 's/^/# /' "$work/bench"
    done
    for how in "" --unpacked; do
        rm -f "$work/allocations"
        LK_COUNT_ALLOCATIONS=$work/allocations LD_PRELOAD=$build/tests/gpu/count_allocations.so \
            ours "$build/bench/bench_nccl_update" tiny --updates 6 --digests off \
            --count "$work/allocations" --nccl-library "$nccl" $how >"$work/bench" 2>&1
        ok "updates after the first allocate nothing through the driver ${how:-packed}" $?
        grep -E 'no allocation|error|fail|allocated' "$work/bench" | sed 's/^/# /'
        sort "$work/allocations" | cut -d' ' -f2 | uniq -c | sort -rn | head -6 | sed 's/^/# /'
    done
    make_model nccl qwen3_moe 7
    export CUDA_VISIBLE_DEVICES=0
    if serve nccl "$work/nccl" --device cuda-store --nccl-library "$nccl" \
        --weight-transfer-config '{"backend": "nccl"}' --transfer-timeout 6; then
        unset CUDA_VISIBLE_DEVICES
        tap nccl 280 python3 "$here/nccl_torch.py" "$url" "$work/nccl" "$nccl"
        grep -iE 'warn|error' "$work/nccl.log" | tail -20 | sed 's/^/# /'
    else
        unset CUDA_VISIBLE_DEVICES
        ok "cuda-store starts with the nccl engine" 1
    fi
    stop
    ok "it ends cleanly" $?
fi
