#!/bin/bash
# run.sh [BUILD]: the tests that need GPUs, with those that are here. BUILD is a build directory, or
# what pack.sh made of one (default: build). Needs python3 with torch for what a trainer does. Each
# part_*.sh is one subject; the last line of all is "N passed, N failed".
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$root/build}" && pwd) || exit 2
work=$(mktemp -d)
export LK_BUILD_DIR=$build LK_TEST_FIXTURES=$root/tests/fixtures PYTHONUNBUFFERED=1
export LOCKSTEP_TRAINER_LIBRARY=$build/transfer/trainer/liblockstep_trainer.so
passed=0 failed=0
launcher=""

# Our own programs, and Python with our library, find the libraries that came with them.
with_libraries=(env "LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
ours() {
    "${with_libraries[@]}" "$@"
}

note() {
    echo "# $*"
}

# ok NAME STATUS: one result.
ok() {
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok - $1"
    else
        failed=$((failed + 1))
        echo "not ok - $1"
    fi
}

# tap NAME SECONDS [ours] COMMAND...: a program that prints TAP; one more failure if it ends badly.
tap() {
    local name=$1 seconds=$2 status good bad
    local -a prefix=()
    shift 2
    [ "$1" != ours ] || { shift; prefix=("${with_libraries[@]}"); }
    timeout "$seconds" "${prefix[@]}" "$@" >"$work/tap" 2>"$work/tap.err"
    status=$?
    good=$(grep -c '^ok ' "$work/tap")
    bad=$(grep -c '^not ok ' "$work/tap")
    passed=$((passed + good)) failed=$((failed + bad))
    grep -E '^(not ok|# )' "$work/tap"
    echo "# $name: $good passed, $bad failed, exit status $status"
    if [ "$status" -ne 0 ] || [ "$good" -eq 0 ]; then
        tail -15 "$work/tap.err" | sed 's/^/# /'
        [ "$bad" -gt 0 ] || ok "$name (exit status $status)" 1
    fi
}

# serve NAME MODEL FLAGS...: a cluster; url and endpoint are set. Ends with stop.
serve() {
    local name=$1 line
    shift
    endpoint=ipc://$work/$name.sock
    mkfifo "$work/$name.ready"
    "${with_libraries[@]}" "$root/deploy/lockstep" serve "$@" --port 0 --trainer-endpoint "$endpoint" \
        >"$work/$name.ready" 2>"$work/$name.log" &
    launcher=$!
    line=""
    read -r -t 150 line <"$work/$name.ready"
    rm -f "$work/$name.ready"
    url=${line#lockstep: ready on }
    [ -n "$line" ] || { tail -5 "$work/$name.log" | sed 's/^/# /'; stop; return 1; }
}

stop() {
    [ -n "$launcher" ] || return 0
    kill "$launcher" 2>/dev/null
    wait "$launcher"
    local status=$?
    launcher=""
    return $status
}

# make_model NAME ARCH SEED
make_model() {
    ours "$root/deploy/lockstep" make-model --arch "$2" --seed "$3" --out "$work/$1" >/dev/null
}

# digest_of URL: of rank 0.
digest_of() {
    python3 - "$1" <<'PYTHON'
import json, sys, urllib.request
ranks = json.load(urllib.request.urlopen(sys.argv[1] + "/weight_info"))["ranks"]
print(ranks[0]["digest"])
PYTHON
}

finish() {
    stop
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 1' INT TERM

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
[ "$gpus" -gt 0 ] || gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)
note "$gpus GPUs: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)"
if [ "$gpus" -eq 0 ]; then
    note "nothing can be tested without a GPU"
    failed=1
else
    for part in "$here"/part_*.sh; do
        started=$SECONDS
        . "$part"
        stop
        note "$(basename "$part"): $((SECONDS - started)) s"
    done
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
