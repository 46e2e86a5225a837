#!/usr/bin/env bash
# What a machine with one or more GPUs shows that no other does, in one file to send back:
#
#   scripts/gpu_check.sh [--short] [REPORT]     default: gpu_check_report.txt
#
# Every part says what it skips, and why. Without a GPU the kernels run in Triton's interpreter and
# are compiled ahead of time. --short: few cases and repeats, to see that it runs.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
PYTHON=${MONTA_PYTHON:-.venv/bin/python}
[ -x "$PYTHON" ] || PYTHON=python3
SHORT=0
[ "${1:-}" = --short ] && { SHORT=1; shift; }
REPORT=${1:-gpu_check_report.txt}
FAILED=()

size() { if [ "$SHORT" = 1 ]; then echo "$1"; else echo "$2"; fi; }

# part NAME COMMAND...: run it, its output and how it ended go into the report.
part() {
    local name=$1 status
    shift
    printf '\n## %s\n\n$ %s\n' "$name" "$*"
    timeout "$(size 300 1800)" "$@" 2>&1
    status=$?
    printf -- '-> exit status %d\n' "$status"
    [ "$status" = 0 ] || FAILED+=("$name")
}

skip() { printf '\n## %s\n\nskipped: %s\n' "$1" "$2"; }

# ranks N PROGRAM...: under torchrun, as N ranks of this machine.
ranks() { echo "$PYTHON -m torch.distributed.run --standalone --nproc-per-node $1"; }

run() {
    local gpus nccl world multi=()
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)
    nccl=$("$PYTHON" -c 'import torch; print(*torch.cuda.nccl.version(), sep=".")' 2>/dev/null)
    printf '# GPU check of monta-megatron: %s GPUs, NCCL %s\n' "$gpus" "${nccl:-none}"
    part "versions" "$PYTHON" -m monta_megatron.cli doctor
    if [ "$gpus" = 0 ]; then
        skip "kernels on the GPU" "there is no GPU; in the interpreter and compiled instead"
        part "kernels in the interpreter" \
            "$PYTHON" scripts/kernel_tests.py --cases "$(size 2 200)"
        part "kernels compiled for sm_80, sm_90 and sm_100" "$PYTHON" -m pytest -q \
            -p no:cacheprovider tests/unit/kernels/test_compiled_kernels.py
        for name in "streams, with the sync debug mode on" "all chains over NCCL" \
            "several ranks on one GPU" "benchmark"; do
            skip "$name" "there is no GPU"
        done
    else
        command -v nvidia-smi >/dev/null && part "GPUs" nvidia-smi topo -m
        part "kernels: differences, times, GB/s beside a copy" \
            "$PYTHON" scripts/gpu_check.py kernels
        world=$gpus
        # From this NCCL on, ranks may share a GPU: correctness, not speed.
        if [ "$(printf '%s\n' 2.30.3 "$nccl" | sort -V | head -1)" = 2.30.3 ]; then
            multi=(env NCCL_MULTI_RANK_GPU_ENABLE=1)
        fi
        local few=(--experts 32 --top-k 4 --hidden 1024 --tokens 512 --dtype bf16 --repeats 1)
        if [ "$world" -gt 1 ]; then
            # shellcheck disable=SC2046
            part "streams, with the sync debug mode on" $(ranks "$world") scripts/gpu_check.py \
                streams "${few[@]}" --ranks-per-node "$(((world + 1) / 2))"
            # shellcheck disable=SC2046
            part "all chains over NCCL" $(ranks "$world") -m monta_megatron.cli bench "${few[@]}" \
                --ranks-per-node "$(((world + 1) / 2))"
        else
            skip "all chains over NCCL, a rank per GPU" "there is one GPU"
        fi
        if [ ${#multi[@]} -gt 0 ]; then
            # shellcheck disable=SC2046
            part "several ranks on one GPU" "${multi[@]}" CUDA_VISIBLE_DEVICES=0 $(ranks 4) \
                scripts/gpu_check.py streams "${few[@]}" --ranks-per-node 2
        else
            skip "several ranks on one GPU" "NCCL ${nccl:-none} does not; 2.30.3 does"
        fi
        if [ "$world" -gt 1 ]; then
            # shellcheck disable=SC2046
            part "benchmark" $(ranks "$world") -m monta_megatron.cli bench --experts 64 --top-k 8 \
                --hidden 4096 --tokens 4096 --dtype bf16 --repeats "$(size 2 20)"
        else
            skip "benchmark" "there is one GPU, and ranks that share it measure nothing"
        fi
    fi
    part "launches" "$PYTHON" scripts/launch_budget.py --chain hierarchical_alltoall \
        --num-chunks 4 --fused
    printf '\n# %s parts failed%s\n' "${#FAILED[@]}" "${FAILED[*]:+: $(printf '%s; ' "${FAILED[@]}")}"
    [ ${#FAILED[@]} = 0 ]
}

run > >(tee "$REPORT")
status=$?
printf 'the report is in %s\n' "$REPORT" >&2
exit $status
