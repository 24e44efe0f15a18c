#!/bin/sh
# check_curl.sh URL: curl and its ways of sending. One TAP line per check.
url=$1
key="Authorization: Bearer client-key"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failed=0

# check NAME STATUS PATTERN curl-arguments...: the status, and a line of headers or body that matches.
check() {
    name=$1
    status=$2
    pattern=$3
    shift 3
    : >"$tmp/body"
    got=$(curl -sS -m 20 -D "$tmp/head" -o "$tmp/body" -w '%{http_code}' "$@" 2>"$tmp/err")
    if [ "$got" = "$status" ] && cat "$tmp/head" "$tmp/body" | grep -q -- "$pattern"; then
        echo "ok - curl: $name"
    else
        echo "not ok - curl: $name"
        echo "# status $got instead of $status, or no line with: $pattern"
        cat "$tmp/err" "$tmp/head" "$tmp/body" 2>/dev/null | head -c 1000 | sed 's/^/# /'
        echo
        failed=1
    fi
}

gen='{"token_ids":[1,2,3],"sampling_params":{"max_tokens":4,"temperature":0}}'
check "health" 200 '"status":"ok"' "$url/health"
check "a reply has its length" 200 '^Content-Length: [1-9]' "$url/health"
check "models need the key" 401 '^WWW-Authenticate: Bearer' "$url/v1/models"
check "models" 200 '"max_model_len":512' -H "$key" "$url/v1/models"
check "metrics" 200 '^Content-Type: text/plain; version=0.0.4' "$url/metrics"
check "generate" 200 '"finish_reason":"length"' -H "$key" -d "$gen" "$url/inference/v1/generate"
check "a rank of its own" 200 '"weight_versions":\[{"version":"default"' -H "$key" \
    -H "X-data-parallel-rank: 1" -d "$gen" "$url/inference/v1/generate"
check "no such rank" 400 '"param":"X-data-parallel-rank"' -H "$key" \
    -H "X-data-parallel-rank: 9" -d "$gen" "$url/inference/v1/generate"
check "the id comes back" 200 '^X-Request-Id: mine' -H "$key" -H "X-Request-Id: mine" -d "$gen" \
    "$url/inference/v1/generate"
check "a chunked body" 200 '"text_completion"' -H "$key" -H "Transfer-Encoding: chunked" \
    -d '{"prompt":[1],"max_tokens":1}' "$url/v1/completions"
check "a stream" 200 '^data: \[DONE\]' -N -H "$key" \
    -d '{"prompt":[1],"max_tokens":4,"stream":true}' "$url/v1/completions"
check "bad JSON" 400 'Invalid JSON format' -H "$key" -d '{"prompt":' "$url/v1/completions"
check "no such path" 404 '"code":404' "$url/v2/completions"
check "no such method" 405 '^Allow: POST' "$url/v1/completions"
check "HEAD has no body" 405 '^Content-Length: 0' -I "$url/v1/models"
head -c 3000000 /dev/zero | tr '\0' ' ' >"$tmp/big" # blanks before the object: 3 MB, Expect: 100
printf '%s' "$gen" >>"$tmp/big"
check "a body of 3 MB" 200 '"finish_reason":"length"' -H "$key" -H "Expect: 100-continue" \
    --data-binary "@$tmp/big" "$url/inference/v1/generate"
if command -v promtool >/dev/null; then
    curl -sS "$url/metrics" | promtool check metrics >"$tmp/out" 2>&1
    if [ $? -le 3 ] && ! grep -v "should not contain ':'" "$tmp/out" >&2; then
        echo "ok - curl: promtool accepts the metrics"
    else
        echo "not ok - curl: promtool accepts the metrics"
        sed 's/^/# /' "$tmp/out"
        failed=1
    fi
else
    echo "ok - curl: promtool accepts the metrics # SKIP promtool is not installed (package prometheus)"
fi
exit $failed
