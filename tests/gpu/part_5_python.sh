# examples/python/lockstep_trainer.py: torch CUDA tensors over CUDA IPC and, with two GPUs, over NCCL.
for n in 4 5; do
    make_model "python-$n" qwen3_moe "$n"
    serve "python-cpu-$n" "$work/python-$n" --device null
    digest_of "$url" >"$work/python-$n/digest"
    stop
done
for backend in ipc nccl; do
    device=0 nccl=""
    if [ "$backend" = nccl ]; then
        [ "$gpus" -ge 2 ] || { note "NCCL needs two GPUs"; continue; }
        device=1
        nccl=$(python3 "$here/nccl_torch.py" --find-nccl)
    fi
    if serve "python-$backend" "$work/python-5" --device cuda-store --nccl-library "$nccl" \
        --weight-transfer-config "{\"backend\": \"$backend\"}" --transfer-timeout 20; then
        LK_TEST_NCCL_LIBRARY=$nccl tap "python_$backend" 120 ours python3 "$here/python_trainer.py" \
            "$endpoint" "$backend" "$device" "$work/python-4" "$(cat "$work/python-4/digest")" \
            "$work/python-5" "$(cat "$work/python-5/digest")"
        grep -iE 'warn|error' "$work/python-$backend.log" | tail -5 | sed 's/^/# /'
    else
        ok "cuda-store starts with the $backend engine" 1
    fi
    stop
    ok "it ends cleanly after a Python trainer over $backend" $?
done
