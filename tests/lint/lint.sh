#!/bin/sh
# tests/lint/lint.sh: rules of the house that a machine can check, as TAP. Run from anywhere.
cd "$(dirname "$0")/../.." || exit 1
sources=$(find base proto transfer engine_core coordinator api_frontend deploy examples -name '*.[ch]' | sort)
product=$(echo "$sources" | grep -v '^examples/')
n=0

# report NAME OFFENDERS: one TAP line; offenders are printed.
report() {
    n=$((n + 1))
    if [ -z "$2" ]; then
        echo "ok $n - $1"
    else
        echo "$2" | sed 's/^/# /'
        echo "not ok $n - $1"
    fi
}

# only_in NAME PATTERN ALLOWED-FILES: the pattern occurs in product code in these files alone.
only_in() {
    hits=$(grep -lE "$2" $product | grep -vE "^($3)$")
    report "$1" "$hits"
}

only_in "ZeroMQ is used by one file" '\bzmq_[a-z]+ *\(' 'base/port_zmq\.c'
only_in "msgpack-c is used by the wire reader and writer" '\bmsgpack_[a-z_]+ *\(' 'proto/wire_(reader|writer)\.c'
only_in "the clock has one door" '\bclock_gettime *\(' 'base/(env|log)\.c'
only_in "entropy has one door" '\b(getrandom|rand|srand|rand_r|drand48) *\(' 'base/env\.[ch]'
only_in "nothing sleeps to give it time" '\b(sleep|usleep|nanosleep) *\(' 'none'
only_in "the environment is read at start by the spawner and the tool" '\bgetenv *\(' 'base/spawn\.c|deploy/tool/[a-z_]+\.c'

report "no marks of unfinished work" "$(grep -nE '\b(TODO|FIXME|XXX|HACK)\b' $sources)"
report "no absolute machine paths" "$(grep -rnE '/(work|home|root)/[a-z]' --include='*.[ch]' --include='*.md' --include='*.sh' --include='meson.build' . 2>/dev/null | grep -vE '^\./build')"
report "programs' main.c are under 150 lines" "$(for f in $(find . -name main.c -not -path './build*'); do l=$(wc -l <"$f"); [ "$l" -lt 150 ] || echo "$f $l"; done)"
report "every folder of source has a README" "$(for d in $(dirname $product | sort -u); do [ -f "$d/README.md" ] || echo "$d"; done)"
report "lines are at most 100 columns" "$(for f in $product; do awk -v f="$f" 'length($0) > 100 && !/FLAG_|X\(|msg_str|"/ {print f":"FNR}' "$f"; done)"
report "every header has a guard" "$(for f in $(echo "$product" | grep '\.h$' | grep -vE '_impl\.h$|vec_avx'); do grep -q '^#ifndef .*_H$' "$f" || echo "$f"; done)"

# Each header compiles alone.
flags="-D_GNU_SOURCE -std=gnu11 -I. -fsyntax-only -x c"
bad=$(for f in $(echo "$product" | grep '\.h$' | grep -vE '_impl\.h$|vec_avx|kernels_isa'); do echo "#include \"$f\"" | ${CC:-cc} $flags - 2>/dev/null || echo "$f"; done)
report "every header compiles alone" "$bad"
echo "1..$n"
