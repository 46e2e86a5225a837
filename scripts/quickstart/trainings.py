"""What the quickstart trains: one model over an emulated network, another where there is none."""

from dataclasses import dataclass
from pathlib import Path

from prepare_text import VOCAB_SIZE

from monta_megatron.emulation import CPU_RANKS_ARGUMENTS

NODES, RANKS_PER_NODE = 2, 2


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model and its layout, which both dispatchers train.

    Attributes:
        model: what is said of it.
        sizes: Megatron's arguments, those of the model and of its layout.
        monta: arguments that only `monta` gets.
        iterations: of each training, unless the user says otherwise.
        largest_difference: what the losses may differ by, relative.
    """

    model: str
    sizes: str
    monta: tuple[str, ...]
    iterations: int
    largest_difference: float


# Top-8 of many small experts, so that an iteration is mostly exchange. Every token has about four
# of its experts on the other node: stock sends it there four times, a chain that knows nodes once.
# Forced balance chooses experts anew from the seed, so a different last bit never changes a choice.
OVER_A_NETWORK = Training(
    model="2 layers of 32 small experts, top-8, chosen so that the network decides",
    sizes=f"""
        --num-layers 2 --hidden-size 256 --num-attention-heads 4 --kv-channels 16
        --ffn-hidden-size 64 --moe-ffn-hidden-size 32
        --num-experts 32 --moe-router-topk 8 --moe-router-dtype fp32
        --moe-router-load-balancing-type none --moe-router-force-load-balancing
        --seq-length 256 --micro-batch-size 2 --global-batch-size {2 * NODES * RANKS_PER_NODE}
        --expert-model-parallel-size {NODES * RANKS_PER_NODE}
        --lr 2e-3
    """,
    # The planner chooses, by the costs of the emulated cluster; so few iterations leave no time to
    # tune.
    monta=("--moe-monta-tune-steps", "0"),
    iterations=8,
    # Partial sums are added up on the nodes, in another order than stock's.
    largest_difference=1e-6,
)

# Two data-parallel ranks, one micro-batch each: every iteration has one loss.
ON_ONE_MACHINE = Training(
    model="2 layers of 8 experts, top-2; TP 2, EP 2, ETP 2",
    sizes=f"""
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256
        --num-experts 8 --moe-router-topk 2
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
        --seq-length 128 --micro-batch-size 4 --global-batch-size {4 * NODES * RANKS_PER_NODE // 2}
        --tensor-model-parallel-size 2 --sequence-parallel
        --expert-model-parallel-size 2 --expert-tensor-parallel-size 2
        --lr 5e-3
    """,
    monta=(
        # torchrun sees one machine; this says where the nodes of the layout end.
        *("--moe-monta-ranks-per-node", str(RANKS_PER_NODE)),
        # Chosen by name, because for so small a model the planner would pick plain alltoall.
        *("--moe-monta-chain", "alltoall_allgather"),
    ),
    iterations=40,
    # Sums have stock's order, so the losses are the same numbers.
    largest_difference=0.0,
)


def megatron_arguments(training: Training, data_prefix: Path, iterations: int) -> list[str]:
    """Everything but the dispatcher; both trainings get the same."""
    arguments = f"""
        {training.sizes} --max-position-embeddings 256
        --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
        --train-iters {iterations} --eval-iters 0 --eval-interval {iterations} --seed 1234
        --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters {iterations // 20}
        --clip-grad 1.0
        --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 100,0,0
        --distributed-timeout-minutes 3 --log-interval 1
    """.split()
    data = ["--data-path", str(data_prefix), "--data-cache-path", str(data_prefix.parent / "cache")]
    return [*arguments, *data, *CPU_RANKS_ARGUMENTS]


def dispatcher_arguments(training: Training, name: str) -> list[str]:
    """The only difference between the two trainings."""
    monta = training.monta if name == "monta" else ()
    return ["--moe-token-dispatcher-type", name, *monta]
