#!/usr/bin/env bash
# Start one process per rank: in a shell, as a task of srun, or as the batch script of sbatch.
#
#   start.sh [--ranks-per-node N] [--nodes M] [--container-image IMAGE
#            [--container-mounts HOST:CONTAINER,...] [--container-workdir DIR]] -- SCRIPT ARGS...
#
#   SCRIPT             a Python script, or -m MODULE
#   --ranks-per-node   default: $RANKS_PER_NODE, else the GPUs that Slurm gives on a node
#   --nodes            default: all of the job; in a shell $NNODES, else 1
#   --container-image  runs the ranks in it: one that ends in .sif by `apptainer exec`, any other by
#                      Pyxis, in a job only
#
# in a shell    torchrun on this node. Several nodes: the same on each, with NODE_RANK, MASTER_ADDR
#               and MASTER_PORT in the environment.
# under srun    one task per node: torchrun; one task per rank: SCRIPT itself.
# under sbatch  (salloc too) runs itself under srun, one task per node. With
#               `--signal=B:USR1@SECONDS --requeue` every rank gets SIGTERM that long before the
#               time limit, and Megatron's --exit-signal-handler writes a checkpoint and ends; if
#               all ranks end with status 0, the job is requeued and resumes from the checkpoint.
#               It then has the flags that its second tuning windows pinned, if all pinned the same.
#
# A batch script of your own has to end with `exec bash start.sh ...`: Slurm signals nothing else.
#
# The exit status is that of what was started; 2 if nothing was. PYTHON names the interpreter.
set -euo pipefail

say() {
    printf 'start.sh: %s\n' "$*" >&2
}

die() {
    say "$*"
    exit 2
}

# check_count NAME VALUE: refuse what is not an integer >= 1.
check_count() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1: got '$2', must be an integer >= 1"
}

# signal NAME PROCESS...: send a signal to processes, which may have ended already.
signal() {
    kill -"$1" "${@:2}" 2>/dev/null || true
}

# wait_for CHILD: its exit status, however often a trap interrupts the wait.
wait_for() {
    while kill -0 "$1" 2>/dev/null; do
        wait "$1" || true
    done
    wait "$1"
}

first_host() {
    local host
    read -r host < <(scontrol show hostnames "$1") || die "scontrol names no host of '$1'"
    printf '%s\n' "$host"
}

in_shell() {
    nodes=${nodes:-${NNODES:-1}}
    check_count --nodes "$nodes"
    local place=(--standalone)
    if ((nodes > 1)); then
        [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] ||
            die "NODE_RANK, MASTER_ADDR: not set, must be on each of $nodes nodes without Slurm"
        place=(
            --nnodes "$nodes" --node-rank "$NODE_RANK"
            --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
        )
    fi
    ((${#pyxis[@]} == 0)) ||
        die "--container-image: got '$image', must end in .sif outside of a job; see sbatch, salloc"
    exec "${apptainer[@]}" "${torchrun[@]}" "${place[@]}" "$@"
}

# One task of a step: this node's ranks, or one rank.
in_step() {
    [[ -z $image ]] || die "--container-image: not in a step of srun; see sbatch, salloc"
    nodes=${nodes:-$SLURM_STEP_NUM_NODES}
    local tasks=$SLURM_STEP_NUM_TASKS command ranks_are=children
    ((nodes == SLURM_STEP_NUM_NODES)) ||
        die "--nodes: got $nodes, must be the $SLURM_STEP_NUM_NODES nodes of this srun"
    # Set by the batch script; in a container there may be no scontrol to ask.
    ((nodes > 1)) || MASTER_ADDR=${MASTER_ADDR:-localhost}
    MASTER_ADDR=${MASTER_ADDR:-$(first_host "$SLURM_STEP_NODELIST")}
    export MASTER_ADDR MASTER_PORT
    if ((tasks == nodes)); then
        command=(
            "${torchrun[@]}" --nnodes "$nodes" --node-rank "$SLURM_NODEID"
            --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"
        )
    elif ((tasks == nodes * ranks_per_node)); then
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
        export WORLD_SIZE=$tasks LOCAL_WORLD_SIZE=$ranks_per_node
        command=("$python" "$@")
        ranks_are=child
    else
        die "srun started $tasks tasks on $nodes nodes, must be 1 or $ranks_per_node on each"
    fi
    # Some of Slurm's process trackers send USR1 to every process of the step, which would end them.
    (
        trap '' USR1
        exec "${command[@]}"
    ) &
    child=$!
    trap end_ranks USR1 TERM INT
    wait_for "$child"
}

# Ask the ranks of this task to end, or torchrun itself if it has not started any. Where there are
# ranks torchrun is not asked: it would kill them after 30 s, and a checkpoint may take longer.
end_ranks() {
    local ranks=()
    if [[ $ranks_are == children ]]; then
        read -ra ranks <"/proc/$child/task/$child/children" || true
    fi
    signal TERM "${ranks[@]:-$child}"
}

# pinned_flags LOG: print the flags that the second tuning window of every exchange has pinned, if
# they are the same. The second window opens STEPS_TO_SECOND (planner/tuning.py) after the first.
pinned_flags() {
    awk '
        /auto, ranks [0-9, ]*: .* wins with / {
            exchange = step = flags = $0
            sub(/.*auto, ranks /, "", exchange)
            sub(/:.*/, "", exchange)
            sub(/.*trials in steps /, "", step)
            sub(/.*pin it with /, "", flags)
            sub(/;.*/, "", flags)
            exchanges[exchange] = 1
            if (step + 0 < 1000) next
            pinned[exchange] = 1
            if (all != "" && all != flags) differ = 1
            all = flags
        }
        END {
            for (exchange in exchanges) if (!(exchange in pinned)) differ = 1
            if (!differ) print all
        }
    ' "$1"
}

# without_choice WORD...: set `words` to the words without the options that pinned flags replace.
without_choice() {
    words=()
    while (($# > 0)); do
        case $1 in
            --moe-monta-chain | --moe-monta-num-chunks | --moe-monta-tune-steps) shift ;;
            --moe-monta-chain=* | --moe-monta-num-chunks=* | --moe-monta-tune-steps=*) ;;
            --moe-monta-overlap-experts) ;;
            *) words+=("$1") ;;
        esac
        shift
    done
}

in_job() {
    nodes=${nodes:-$SLURM_JOB_NUM_NODES}
    local requeue=no status=0 log pinned=() words=("$@")
    if ((${SLURM_RESTART_COUNT:-0} > 0)); then
        log=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *StdOut=//p')
        read -ra pinned < <(pinned_flags "$log") || true
        if ((${#pinned[@]} > 0)); then
            say "pinned by the second tuning windows: ${pinned[*]}"
            # A named chain has no trials; its experts are split only where the winner's were.
            without_choice "$@"
            unset MOE_MONTA_TUNE_STEPS MOE_MONTA_OVERLAP_EXPERTS
            words+=("${pinned[@]}")
        else
            say "no flags are pinned: no second tuning windows with one winner in $log"
        fi
    fi
    MASTER_ADDR=$(first_host "$SLURM_JOB_NODELIST")
    export MASTER_ADDR MASTER_PORT
    # Pass the text of this file, since Slurm's copy of a batch script is on one node only. Without
    # a CPU binding the one task of a node may use all the cores of the job there.
    # On some clusters a job passes nothing of its environment to its steps unless it says so.
    srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --cpu-bind none --kill-on-bad-exit \
        --export ALL "${pyxis[@]}" "${apptainer[@]}" bash -c "$(<"$0")" \
        start.sh --ranks-per-node "$ranks_per_node" --nodes "$nodes" -- "${words[@]}" &
    child=$!
    trap 'requeue=yes; signal USR1 "$child"' USR1
    trap 'signal TERM "$child"' TERM INT
    wait_for "$child" || status=$?
    if [[ $requeue == yes && $status == 0 ]]; then
        trap - TERM
        say "the ranks have ended as signalled; job $SLURM_JOB_ID is requeued"
        scontrol requeue "$SLURM_JOB_ID"
    elif [[ $requeue == yes ]]; then
        say "the ranks have ended with status $status as signalled; not requeued." \
            "Megatron needs --exit-signal-handler"
    fi
    exit "$status"
}

python=${PYTHON:-python}
ranks_per_node=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
nodes='' image='' mounts='' workdir=''
while (($# > 0)); do
    case $1 in
        --ranks-per-node) ranks_per_node=${2:-} ;;
        --nodes) nodes=${2:-}; check_count "$1" "$nodes" ;;
        --container-image) image=${2:-} ;;
        --container-mounts) mounts=${2:-} ;;
        --container-workdir) workdir=${2:-} ;;
        --) shift; break ;;
        *) die "got '$1', must be --ranks-per-node N, --nodes M, --container-..., or -- before the" \
            "script" ;;
    esac
    shift $(($# > 1 ? 2 : 1))
done
check_count --ranks-per-node "$ranks_per_node"
(($# > 0)) || die "no script after --"
torchrun=("$python" -m monta_megatron.common.torchrun --nproc-per-node "$ranks_per_node")
pyxis=() apptainer=()
if [[ $image == *.sif ]]; then
    apptainer=(apptainer exec --nv ${mounts:+--bind "$mounts"} ${workdir:+--pwd "$workdir"} "$image")
elif [[ -n $image ]]; then
    pyxis=(
        --container-image "$image" ${mounts:+--container-mounts "$mounts"}
        ${workdir:+--container-workdir "$workdir"}
    )
fi

# The steps of salloc's own shell and of batch scripts have reserved numbers, the highest ones.
if [[ -z ${SLURM_JOB_ID:-} ]]; then
    in_shell "$@"
fi
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
if ((${SLURM_STEP_ID:-4294967295} < 4294967280)); then
    in_step "$@"
else
    in_job "$@"
fi
