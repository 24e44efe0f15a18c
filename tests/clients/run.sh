#!/bin/sh
# run.sh BUILD: other people's clients against a cluster of this build. TAP on standard output.
set -u
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
work=$build/clients
log=$work/cluster.log
mkdir -p "$work"
export LK_BUILD_DIR="$build"
launcher=""

stop() {
    [ -z "$launcher" ] || kill "$launcher" 2>/dev/null
    wait
}
trap stop EXIT
trap 'exit 1' INT TERM

# The virtual environment; kept until the requirements change. Prints why it can not be made.
make_venv() {
    venv=$work/venv
    cmp -s "$here/requirements.txt" "$venv/requirements.txt" && return 0
    rm -rf "$venv"
    python3 -m venv "$venv" >"$work/pip.log" 2>&1 || {
        echo "python3 -m venv does not work (package python3-venv)"
        return 1
    }
    timeout 300 "$venv/bin/pip" install --quiet --disable-pip-version-check --retries 1 --no-deps \
        -r "$here/requirements.txt" >"$work/pip.log" 2>&1 || {
        echo "pip can not install the pinned packages: $(tail -1 "$work/pip.log")"
        return 1
    }
    cp "$here/requirements.txt" "$venv/requirements.txt"
}

start_cluster() {
    rm -rf "$work/model"
    "$here/../../deploy/lockstep" make-model --arch qwen3_moe --out "$work/model" --seed 3 \
        --max-positions 512 >"$work/model.log" 2>&1 || { cat "$work/model.log"; return 1; }
    rm -f "$work/out"
    mkfifo "$work/out" || return 1
    "$here/../../deploy/lockstep" serve "$work/model" --port 0 --device null \
        --data-parallel-size 2 --enable-expert-parallel --max-num-seqs 256 \
        --api-key client-key --admin-key admin-key >"$work/out" 2>"$log" &
    launcher=$!
    read -r line <"$work/out" || { tail -5 "$log"; return 1; }
    url=${line#lockstep: ready on }
}

run() {
    if why=$(make_venv); then
        PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" "$here/tap.py" check_openai "$url"
        PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" "$here/tap.py" check_streams "$url"
        PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" "$here/tap.py" check_trainer "$url"
    else
        echo "ok - openai, asyncio, numpy # SKIP $why"
    fi
    sh "$here/check_curl.sh" "$url"
    if kill "$launcher" && wait "$launcher"; then
        echo "ok - the cluster ends cleanly"
    else
        echo "not ok - the cluster ends cleanly"
        tail -20 "$log" | sed 's/^/# /'
    fi
}

if ! start_cluster >"$work/start.log" 2>&1; then
    echo "1..1"
    echo "not ok 1 - the cluster starts"
    sed 's/^/# /' "$work/start.log"
    exit 1
fi
run >"$work/tap"
launcher=""
awk '/^(not )?ok - /{ n++; sub(/ok - /, "ok " n " - ") } { print } END { print "1.." n+0 }' "$work/tap"
! grep -q '^not ok' "$work/tap"
