#!/bin/sh
# tests/model/run.sh CONFORMANCE [--small] [--tap] [NAME...]: checks the models of models.list with
# spin, one at a time (--small: two), and prints bounds, states, depth, time and memory of each; the
# last line is "N passed, N failed" (with --tap: TAP). A model passes if the search was complete, below
# its depth and memory limits, and found no error, or, where the list expects one, if it found an error
# of that kind.
# With RECORD, the program CONFORMANCE must also find that the code decides as the model does, or, if
# the list expects `drift`, that it does not.
set -u
here=$(cd "$(dirname "$0")" && pwd)
memory=${LK_MODEL_MB:-4800}
depth=1000000

# check_one DIR CONFORMANCE SIZE EXPECT SEARCH NAME SETTINGS...: leaves DIR/NAME.result (ok or not ok, and a line).
check_one() {
    work=$1 conformance=$2 size=$3 expect=$4 search=$5 name=$6
    shift 6
    dir=$work/$name
    mkdir -p "$dir"
    cp "$here"/*.pml "$here"/record.h "$dir"
    cd "$dir" || exit 1
    model=group.pml
    : >settings.pml
    for setting in "$@"; do
        case $setting in
        file=*) model=${setting#file=} ;;
        *=*) echo "#define ${setting%%=*} ${setting#*=}" >>settings.pml ;;
        *) echo "#define $setting" >>settings.pml ;;
        esac
    done
    flags="-DSAFETY" options="" hash=26 optimise=-O2
    [ "$search" = safety ] || flags="-DNP" options="-l"
    [ "$size" = full ] || hash=18 optimise=-O0 # most of the time is the compiler's
    # the search is exhaustive: neither bit-state hashing nor hash compaction
    if ! { spin -a "$model" && gcc "$optimise" -w -DNOREDUCE -DMEMLIM="$memory" -DVECTORSZ=4096 $flags -o pan pan.c; } >build.log 2>&1; then
        echo "not ok $name: $(tail -1 build.log)" >result && mv result "$work/$name.result"
        return
    fi
    start=$(date +%s.%N)
    # shellcheck disable=SC2086
    ./pan -m"$depth" -w"$hash" -n $options >pan.log 2>&1
    seconds=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
    found=none
    grep -q 'errors: 0' pan.log || found=$(sed -n '
        s/^pan:[0-9]*: assertion violated.*/assert/p
        s/^pan:[0-9]*: non-progress cycle.*/cycle/p
        s/^pan:[0-9]*: invalid end state.*/deadlock/p' pan.log | head -1)
    incomplete=$(grep -E 'max search depth|out of memory|Search not completed|reached -DMEMLIM|VECTORSZ' pan.log | head -1)
    rows=""
    case " $* " in
    *" RECORD "*)
        "$conformance" decide.rows >conformance.log 2>&1
        case $? in
        0) [ "$expect" != drift ] || found="no drift" ;;
        1) found=drift ;;
        *) found="no conformance" ;;
        esac
        rows=", $(tail -1 conformance.log)"
        ;;
    esac
    if [ "$expect" = ok ] && [ "$found" = none ] && [ -z "$incomplete" ]; then
        verdict=ok
    elif [ "$expect" = "$found" ]; then
        verdict=ok
    else
        verdict="not ok"
    fi
    awk -v v="$verdict" -v n="$name" -v found="$found" -v s="$seconds" -v more="$incomplete" -v set="$*" -v rows="$rows" '
        / states, stored/ { states = $1 }
        /depth reached/ { for (i = 1; i < NF; i++) if ($i == "reached") depth = $(i + 1) + 0 }
        /total actual memory usage/ { mb = $1 }
        END {
            if (found == "none") r = "errors: 0"; else r = "found " found
            printf "%s %s: %s, %d states, depth %d, %s s, %d MB%s%s [%s]\n", v, n, r, states, depth, s,
                mb, more == "" || found != "none" ? "" : ", " more, rows, set
        }' pan.log >result && mv result "$work/$name.result"
}

if [ "${1:-}" = --one ]; then
    shift
    check_one "$@"
    exit 0
fi

conformance=$(realpath "$1")
shift
only=""
tap=""
while [ $# -gt 0 ]; do
    case $1 in
    --small) only=small ;;
    --tap) tap=1 ;;
    *) break ;;
    esac
    shift
done
command -v spin >/dev/null || {
    echo "run.sh: spin is not installed (Debian package spin)" >&2
    exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -E '^(small|full)' "$here/models.list" |
    awk -v only="$only" -v names=" $* " '(only == "" || $1 == only) && (names == "  " || index(names, " " $4 " "))' >"$work/list"
jobs=2
[ -n "$only" ] || jobs=1
xargs -P "$jobs" -L 1 sh "$here/run.sh" --one "$work" "$conformance" <"$work/list" &
runner=$!
n=0 passed=0 failed=0
while read -r size expect search name settings; do
    # results are printed in the list's order, each as soon as it is there
    while [ ! -e "$work/$name.result" ] && kill -0 "$runner" 2>/dev/null; do
        sleep 0.1
    done
    n=$((n + 1))
    line=$(cat "$work/$name.result" 2>/dev/null || echo "not ok $name: no result")
    case $line in
    ok*) passed=$((passed + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
    if [ -n "$tap" ]; then
        echo "$line" | sed "s/^\(not ok\|ok\) /\1 $n - /"
    else
        echo "$line"
    fi
done <"$work/list"
wait
if [ -n "$tap" ]; then
    echo "1..$n"
else
    echo "$passed passed, $failed failed"
fi
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
