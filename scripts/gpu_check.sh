#!/usr/bin/env bash
# Prove on a machine with one or more GPUs what no other machine can; one report to send back:
#
#   scripts/gpu_check.sh [--short] [--limit SECONDS] [REPORT]     default: gpu_check_report.txt
#
# Needs torch, triton, numpy, pyyaml and megatron-core, no installation and no network. The most
# decisive parts come first; after SECONDS (540) what is left is not run, and the report says so.
# --short: few cases, to see that it runs.
#
# Exit status: 0 all parts passed or do not apply here; 1 a part failed; 3 none failed, and a part
# was not run.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
PYTHON=${MONTA_PYTHON:-.venv/bin/python}
[ -x "$PYTHON" ] || PYTHON=python3
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
SHORT=() LIMIT=540
while [ $# -gt 0 ]; do
    case $1 in
    --short) SHORT=(--short) && shift ;;
    --limit) LIMIT=${2:?--limit: missing, must be a number of seconds} && shift 2 ;;
    -*) echo "gpu_check.sh: error: $1: unknown, must be --short or --limit SECONDS" >&2 && exit 2 ;;
    *) break ;;
    esac
done
case $LIMIT in '' | *[!0-9]*) echo "gpu_check.sh: error: --limit: got $LIMIT, must be seconds" >&2 && exit 2 ;; esac
REPORT=${1:-gpu_check_report.txt}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
PASSED=() FAILED=() NOT_RUN=()

# part NAME LIMIT COMMAND...: what it prints and how it ended go into the report. It has passed if
# it ends with status 0 and a line "proven: ...": an interpreter that does nothing proves nothing.
part() {
    local name=$1 limit=$2 left=$((LIMIT - SECONDS)) status
    shift 2
    printf '\n## %s\n\n$ %s\n' "$name" "$*"
    if [ "$left" -lt 5 ]; then
        skip "$name" "the limit of $LIMIT s is over"
        return
    fi
    [ "$limit" -lt "$left" ] || limit=$left
    timeout --kill-after 5 "$limit" "$@" >"$WORK/output" 2>&1
    status=$?
    cat "$WORK/output"
    printf -- '-> exit status %d after %d s in all\n' "$status" "$SECONDS"
    if [ "$status" = 0 ] && grep -q '^proven: ' "$WORK/output"; then
        PASSED+=("$name: $(sed -n 's/^proven: //p' "$WORK/output" | tail -n 1)")
    elif [ "$status" = 0 ]; then
        NOT_RUN+=("$name: it ended without saying what it proves")
    elif [ "$status" = 124 ] || [ "$status" = 137 ]; then
        NOT_RUN+=("$name: it took over $limit s")
    elif [ "$status" = 3 ]; then
        NOT_RUN+=("$name: $(tail -n 1 "$WORK/output")")
    else
        FAILED+=("$name: exit status $status")
    fi
}

skip() {
    printf 'not run: %s: %s\n' "$1" "$2"
    NOT_RUN+=("$1: $2")
}

check() { part "$1" "$2" "$PYTHON" scripts/gpu_check.py "${@:3}" ${SHORT[@]+"${SHORT[@]}"}; }

# ranks NAME LIMIT N COMMAND...: the same as N processes.
ranks() {
    part "$1" "$2" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$3" \
        scripts/gpu_check.py "${@:4}" ${SHORT[@]+"${SHORT[@]}"}
}

run() {
    local gpus nccl
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)
    nccl=$("$PYTHON" -c 'import torch; print(*torch.cuda.nccl.version(), sep=".")' 2>/dev/null)
    printf '# GPU check of monta-megatron: %s GPUs, NCCL %s\n' "$gpus" "${nccl:-none}"
    check "versions" 60 versions
    command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm --format=csv
    if [ "$gpus" = 0 ]; then
        for name in "kernel bits" "replay" "host times" "kernel times" "Gloo" "NCCL"; do
            skip "$name" "there is no GPU"
        done
        return
    fi
    check "kernel bits" 120 bits
    # Without GPUs: the processes that record must not take memory on them.
    part "record" 120 env CUDA_VISIBLE_DEVICES= "$PYTHON" scripts/gpu_check.py record \
        "$WORK/record.pt" ${SHORT[@]+"${SHORT[@]}"}
    if [ -e "$WORK/record.pt" ]; then
        for queues in 32 1; do
            part "replay, $queues launch queues" 120 env CUDA_DEVICE_MAX_CONNECTIONS=$queues \
                "$PYTHON" scripts/gpu_check.py replay "$WORK/record.pt" ${SHORT[@]+"${SHORT[@]}"}
        done
        part "host times" 90 "$PYTHON" scripts/gpu_check.py host "$WORK/record.pt" \
            ${SHORT[@]+"${SHORT[@]}"}
    else
        skip "replay" "nothing was recorded"
        skip "host times" "nothing was recorded"
    fi
    check "kernel times" 90 times
    for processes in 2 4; do
        ranks "Gloo, $processes processes" 90 "$processes" gloo --ranks-per-node $((processes / 2))
    done
    if [ "$gpus" -gt 1 ]; then
        ranks "NCCL, a rank per GPU" 240 "$gpus" bench --ranks-per-node $(((gpus + 1) / 2))
    # From this NCCL on, ranks may share a GPU: correctness, not speed.
    elif [ "$(printf '%s\n' 2.30.3 "$nccl" | sort -V | head -n 1)" = 2.30.3 ]; then
        export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=2
        ranks "NCCL, 2 ranks on one GPU" 90 2 bench --ranks-per-node 1
    else
        skip "NCCL" "there is one GPU, and NCCL ${nccl:-none} has one rank on it; 2.30.3 has more"
    fi
}

lines() {
    printf '%s: %d\n' "$1" $(($# - 1))
    shift
    [ $# = 0 ] || printf '  %s\n' "$@"
}

report() {
    run
    printf '\n# Summary, after %d s\n\n' "$SECONDS"
    lines "proven" ${PASSED[@]+"${PASSED[@]}"}
    lines "failed" ${FAILED[@]+"${FAILED[@]}"}
    lines "not run, so not proven" ${NOT_RUN[@]+"${NOT_RUN[@]}"}
    [ ${#FAILED[@]} = 0 ] || return 1
    [ ${#NOT_RUN[@]} = 0 ] || return 3
}

report > >(tee "$REPORT")
status=$?
printf 'the report is in %s\n' "$REPORT" >&2
exit $status
