#!/usr/bin/env bash
# The sweep of docs/benchmarks: all points at one rate between the nodes, then some of them at
# others, one emulated cluster after the other. What FILE.jsonl holds already is not run again, so
# a start that was killed goes on.
#
#   scripts/benchmark_sweep.sh CLUSTER.yaml MBIT FILE.jsonl [FLAGS OF monta bench...]
#
# CLUSTER.yaml is what `monta calibrate` wrote on the emulated cluster at MBIT Mbit/s. To compare
# `auto` with stock alone: FLAGS = --chains auto --repeats 15. RATES names other rates, in Mbit/s.
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
cluster=$1 calibrated_mbit=$2 out=$3
shift 3
benchmarks=$(dirname "${BASH_SOURCE[0]}")/../benchmarks
docs=$(dirname "${BASH_SOURCE[0]}")/../docs/benchmarks

# The calibrated rate has the longer list of points. The faster the network, the more the speed of
# the cores counts, so the fastest rates are measured first, soonest after the calibration.
for mbit in ${RATES:-10000 5000 2500 1000 "$calibrated_mbit" 200}; do
    sweep=$docs/sweep_2x4_by_rate.yaml
    [ "$mbit" != "$calibrated_mbit" ] || sweep=$docs/sweep_2x4.yaml
    ratio=$(awk "BEGIN {print $mbit / $calibrated_mbit}")
    "${PYTHON:-python3}" -m monta_megatron emulate \
        --nodes 2 --ranks-per-node 4 --inter-mbit "$mbit" -- \
        "$benchmarks/sweep.py" --sweep "$sweep" --out "$out" \
        --cluster "$cluster" --inter-rate-ratio "$ratio" "$@"
done
