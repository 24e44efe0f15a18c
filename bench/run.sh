#!/bin/sh
# bench/run.sh BUILD [NAME]: runs the benchmarks (or those whose name contains NAME). Each prints its
# raw figures and, from the same run, the floor they are held against; docs/BENCHMARKS.md keeps tables.
set -u
build=$1
name=${2:-}
cd "$(dirname "$0")/.."
for b in "$build"/bench/bench_*"$name"*; do
    [ -x "$b" ] && [ ! -d "$b" ] || continue
    echo "== $(basename "$b") ($(date -u +%F), $(nproc) cores, $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1))"
    "$b"
    status=$?
    [ $status -eq 0 ] || [ $status -eq 77 ] || exit 1 # 77: not on this machine
done
case llamacpp in *"$name"*)
    echo "== bench_llamacpp.py ($(date -u +%F))"
    "${LLAMA_PYTHON:-python3}" bench/bench_llamacpp.py "$build/bench/bench_cpu"
    status=$?
    [ $status -eq 0 ] || [ $status -eq 77 ] || exit 1
    ;;
esac
