# --device cuda-store: the same weights as on the CPU, whichever way they come.
for arch in qwen3_moe qwen3; do
    make_model "$arch-1" "$arch" 1 && make_model "$arch-2" "$arch" 2
    serve "$arch-cpu" "$work/$arch-1" --device cpu && want1=$(digest_of "$url")
    stop
    serve "$arch-cpu2" "$work/$arch-2" --device cpu && want2=$(digest_of "$url")
    stop
    if serve "$arch-gpu" "$work/$arch-1" --device cuda-store \
        --weight-transfer-config '{"backend": "tcp"}'; then
        [ "$(digest_of "$url")" = "$want1" ]
        ok "$arch: the digest of a load is the CPU's" $?
        python3 - "$url" <<'PYTHON'
import json, sys, urllib.request, urllib.error
body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4}).encode()
request = urllib.request.Request(sys.argv[1] + "/v1/completions", body,
                                 {"Content-Type": "application/json"})
try:
    urllib.request.urlopen(request)
    sys.exit("it generates")
except urllib.error.HTTPError as error:
    text = json.load(error)["error"]["message"]
    print("#", error.code, text)
    sys.exit(0 if error.code == 503 and "cuda-store" in text and "GPU" in text else 1)
PYTHON
        ok "$arch: generation is refused, with the device's name" $?
        ours "$build/examples/push_weights" --endpoint "$endpoint" --model "$work/$arch-2" \
            --version step-1 --pause keep >"$work/push" 2>&1
        ok "$arch: an update over tcp" $?
        sed 's/^/# /' "$work/push"
        [ "$(digest_of "$url")" = "$want2" ]
        ok "$arch: its digest is the CPU's" $?
    else
        ok "$arch: cuda-store starts" 1
    fi
    stop
    ok "$arch: it ends cleanly" $?
done
