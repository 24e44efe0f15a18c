# A rank killed in mid-transfer on real GPUs: the trainer is told, the next init counts the ranks that
# are left, and its session works on them (bench/bench_nccl_update.c --kill), dense and with experts.
if [ "$gpus" -lt 3 ]; then
    note "a rank can be lost for good with three GPUs"
else
    nccl=$(python3 "$here/nccl_torch.py" --find-nccl)
    for model in qwen3-8b qwen3-30b-a3b; do
        timeout 400 env "LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
            "$build/bench/bench_nccl_update" $model --ranks 2 --updates 3 --digests on --kill \
            --nccl-library "$nccl" >"$work/bench" 2>&1
        ok "$model: a session over the survivors of a killed rank" $?
        sed 's/^/# /' "$work/bench"
    done
fi
