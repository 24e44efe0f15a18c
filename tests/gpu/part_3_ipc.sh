# Weights from a torch process on the same GPU.
for n in 1 2 3; do
    make_model "ipc-$n" qwen3_moe "$n"
    serve "ipc-cpu-$n" "$work/ipc-$n" --device null
    digest_of "$url" >"$work/ipc-$n/digest"
    stop
done
if serve ipc "$work/ipc-1" --device cuda-store --weight-transfer-config '{"backend": "ipc"}' \
    --transfer-timeout 10; then
    tap ipc 200 python3 "$here/ipc_torch.py" "$url" "$work/ipc-1" "$work/ipc-2" "$work/ipc-3"
else
    ok "cuda-store starts with the ipc engine" 1
fi
stop
ok "it ends cleanly" $?
tap ipc_bench 200 ours python3 "$root/bench/ipc_update.py" --tap # the library is in its process
