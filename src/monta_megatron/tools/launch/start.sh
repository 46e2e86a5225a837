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
# under srun    one task per node: torchrun; one task per rank: SCRIPT itself. Each task has to see
#               the GPUs of all ranks of its node.
# under sbatch  (salloc too) runs itself under srun, one task per node. With
#               `--signal=B:USR1@SECONDS --requeue` every rank gets SIGTERM that long before the
#               time limit, and Megatron's --exit-signal-handler writes a checkpoint and ends; if
#               all ranks end with status 0, the job is requeued and resumes from the checkpoint,
#               with the flags that its tuning windows have pinned (pinned.py). Their results are
#               kept in the folder $MONTA_TUNING_RESULTS (default: ./monta-tuning-JOB).
#
# MASTER_ADDR is kept where it is given. Without it Slurm's name of the first node is taken; a site
# may have another name for the network of the ranks.
#
# A batch script of your own has to end with `exec bash start.sh ...`: Slurm signals nothing else.
#
# The exit status is that of what was started; 2 if nothing was. PYTHON names the interpreter.
set -euo pipefail

say() {
    printf 'start.sh: %s\n' "$*" >&2
}

# Of the tasks of a step the first one says it. Those that Slurm has not ended after a while may
# have made a mistake of their own, and say it once per node.
die() {
    if ((${SLURM_PROCID:-0} == 0)); then
        say "$*"
    else
        # Slurm may end this process and its sleep, in either order.
        trap 'exit 2' TERM
        sleep 5 &
        wait $! || exit 2
        ((SLURM_LOCALID > 0)) || say "$* (on $SLURMD_NODENAME)"
    fi
    exit 2
}

# check_count NAME VALUE: refuse what is not an integer >= 1.
check_count() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1: got '$2', must be an integer >= 1"
}

# With such an address every node would look for the first rank on itself.
check_address() {
    ((nodes > 1)) || return 0
    case ${MASTER_ADDR:-} in
        localhost | localhost.* | 127.* | ::1)
            die "MASTER_ADDR: got '$MASTER_ADDR', must be an address by which the $nodes nodes" \
                "reach the first one; in a job of Slurm it may be left out"
            ;;
    esac
}

# Local rank N takes the device N of those that its task sees.
check_devices() {
    local devices
    IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-}"
    if [[ ${MONTA_CPU_RANKS:-0} != 1 ]] &&
        ((${#devices[@]} > 0 && ${#devices[@]} < ranks_per_node)); then
        die "CUDA_VISIBLE_DEVICES: got '$CUDA_VISIBLE_DEVICES', must be a device for each of the" \
            "$ranks_per_node ranks of a node; ask for --gpus-per-node $ranks_per_node in place of" \
            "--gpus-per-task"
    fi
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
        check_address
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
    check_devices
    check_address
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
    # It runs the command in its own process.
    [[ -z ${MONTA_TUNING_RESULTS:-} ]] ||
        command=("$python" -m monta_megatron.tools.launch.pinned "${command[@]}")
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

in_job() {
    nodes=${nodes:-$SLURM_JOB_NUM_NODES}
    local requeue=no status=0
    ((${SLURM_HET_SIZE:-1} == 1)) ||
        die "heterogeneous job: got $SLURM_HET_SIZE parts, must be one, as only the first would" \
            "start; start this script in one of them with \`srun --het-group N bash start.sh ...\`"
    check_address
    MASTER_ADDR=${MASTER_ADDR:-$(first_host "$SLURM_JOB_NODELIST")}
    export MONTA_TUNING_RESULTS=${MONTA_TUNING_RESULTS:-$PWD/monta-tuning-$SLURM_JOB_ID}
    export MASTER_ADDR MASTER_PORT
    # Pass the text of this file, since Slurm's copy of a batch script is on one node only. Without
    # a CPU binding the one task of a node may use all the cores of the job there.
    # On some clusters a job passes nothing of its environment to its steps unless it says so.
    srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --cpu-bind none --kill-on-bad-exit \
        --export ALL "${pyxis[@]}" "${apptainer[@]}" bash -c "$(<"$0")" \
        start.sh --ranks-per-node "$ranks_per_node" --nodes "$nodes" -- "$@" &
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
