#!/bin/sh
# The shared library shows lst_* and nothing else.
set -e
shown=$(nm -D --defined-only "$1" | awk '{print $3}')
[ -n "$shown" ]
others=$(echo "$shown" | grep -v '^lst_' || true)
[ -z "$others" ] || { echo "also visible: $others"; exit 1; }
echo "$shown" | grep -qx lst_update
