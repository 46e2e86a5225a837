"""Read a training's log: what its loop printed of arguments, iterations and GPUs.

Megatron-LM prints its arguments in a block of `name .... value`, Megatron Bridge its configuration
as YAML. Both print `iteration 7/ 100 | ... elapsed time per iteration (ms): 8600.1 |`; the loop of
NeMo prints `iteration 7/99 | ... | train_step_timing in s: 8.6`. Labels of ranks, Slurm and clocks
may stand in front of a line, and colours inside it. A training that was started again goes on in
the same file.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from monta_megatron.planner.assumptions import CPU_RANKS, gpu_names
from monta_megatron.tools.launch.arguments import Argument, Arguments, key_of
from monta_megatron.tools.launch.log import ITERATION, PEAK_MIB, TIME_MS, not_repeated

COLOUR = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
STEP_S = re.compile(r"train_step_timing in s: (\d+(?:\.\d+)?)")
TFLOPS = re.compile(r"(?:TFLOP/s/GPU\)|MODEL_TFLOP/s/GPU): *(\d+(?:\.\d+)?)")
SKIPPED = re.compile(r"number of skipped iterations: *(\d+)")
DOTTED = re.compile(r"(?:^|[\s\]:>|])([a-z][a-z0-9_]*) \.{2,} (.*)$")
YAML = re.compile(r"(?:^|[\s\]>|])([a-z][a-z0-9_]*): +([^\s{][^|{]*)$")
# Of TransformerConfig -> Megatron's argument.
OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
# Read where they stand in YAML; elsewhere such a line may be anything.
OF_YAML = frozenset(
    [
        "bf16",
        "context_parallel_size",
        "cuda_graph_impl",
        "enable_cuda_graph",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "ffn_hidden_size",
        "global_batch_size",
        "hidden_size",
        "kv_channels",
        "kv_lora_rank",
        "micro_batch_size",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_permute_fusion",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_topk",
        "moe_shared_expert_intermediate_size",
        "moe_token_dispatcher_type",
        "mtp_num_layers",
        "multi_latent_attention",
        "num_attention_heads",
        "num_layers",
        "num_moe_experts",
        "num_query_groups",
        "overlap_moe_expert_parallel_comm",
        "pipeline_model_parallel_size",
        "q_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "recompute_granularity",
        "seq_length",
        "tensor_model_parallel_size",
        "v_head_dim",
        "virtual_pipeline_model_parallel_size",
        "vocab_size",
        "world_size",
    ]
)
# A line of `emulation.cpu_ranks`.
ON_CPU_RANKS = f"{CPU_RANKS} stand in for CUDA"
UNSET = ("None", "null", "False", "false", "none", "")


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """The last training of a log.

    Attributes:
        file: the log.
        arguments: Megatron's arguments that are not off.
        lines: key of an argument -> the line that says it, with its number.
        times_ms: iteration -> its time.
        tflops_per_gpu: median of what the loop printed; None if it did not.
        num_skipped: iterations that were skipped, as last counted.
        peak_memory_bytes: the most that a rank had allocated; None if it is not said.
        gpu: the GPU that the log names; None if it names none.
    """

    file: str
    arguments: Arguments
    lines: Mapping[str, str]
    times_ms: Mapping[int, float]
    tflops_per_gpu: float | None
    num_skipped: int
    peak_memory_bytes: float | None
    gpu: str | None

    @property
    def steady_ms(self) -> list[float]:
        """Times without the first tenth, in which everything starts."""
        times_ms = list(self.times_ms.values())
        return times_ms[max(1, len(times_ms) // 10) :] or times_ms

    @property
    def iteration_ms(self) -> float:
        """Median of the steady iterations."""
        return median(self.steady_ms)


def read_training_log(path: Path) -> TrainingRecord:
    """Read a log line by line; what is no line of a training's loop is passed over.

    Raises:
        ValueError: it cannot be read, or holds no timed iteration.
    """
    said: dict[str, tuple[str, str]] = {}
    timed: list[tuple[int, tuple[float, float | None]]] = []
    num_skipped, peak_mib, gpu = 0, 0.0, None
    known_gpu = re.compile(rf"\b({'|'.join(gpu_names())})\b")
    for number, line in _lines(path):
        if (iteration := ITERATION.search(line)) is not None:
            ms, seconds = TIME_MS.search(line), STEP_S.search(line)
            if ms or seconds:
                time_ms = float(ms[1]) if ms else 1e3 * float(seconds[1]) if seconds else 0.0
                tflops = TFLOPS.search(line)
                timed.append((int(iteration[1]), (time_ms, float(tflops[1]) if tflops else None)))
            skipped = SKIPPED.search(line)
            num_skipped = int(skipped[1]) if skipped else num_skipped
        elif (dotted := DOTTED.search(line)) is not None:
            said[dotted[1]] = dotted[2].strip(), f"line {number}: {line.strip()}"
        elif (peak := PEAK_MIB.search(line)) is not None:
            peak_mib = max(peak_mib, float(peak[1]))
        elif (found := YAML.search(line)) is not None and found[1] in OF_YAML:
            said[found[1]] = found[2].strip(), f"line {number}: {line.strip()}"
        if gpu is None and ON_CPU_RANKS in line:
            gpu = CPU_RANKS
        if gpu is None and (named := known_gpu.search(line)) is not None:
            gpu = named[1]
    kept = not_repeated(timed)
    if not kept:
        raise ValueError(
            f"--log: {path}: holds no timed iteration, must be the output of a training by "
            "Megatron-LM, Megatron Bridge or NeMo: `iteration N/ M | ... elapsed time per "
            "iteration (ms): X |`"
        )
    all_tflops = [tflops for _, (_, tflops) in kept if tflops is not None]
    return TrainingRecord(
        file=str(path),
        arguments=_arguments(said, str(path)),
        lines={key_of(OTHER_NAMES.get(name, name)): line for name, (_, line) in said.items()},
        times_ms={iteration: time_ms for iteration, (time_ms, _) in kept},
        tflops_per_gpu=median(all_tflops) if all_tflops else None,
        num_skipped=num_skipped,
        peak_memory_bytes=peak_mib * 2**20 or None,
        gpu=gpu,
    )


# One of these is in every line that says something, which is found faster than by expressions.
MARKS = ("iteration", " ..", "memory (MB)", ": ", "NVIDIA")
LONGEST_LINE = 4096


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if len(line) < LONGEST_LINE and any(mark in line for mark in MARKS):
                    yield number, COLOUR.sub("", line) if "\x1b" in line else line
    except OSError as error:
        raise ValueError(f"--log: {path}: cannot be read: {error.strerror}") from error


def _arguments(said: Mapping[str, tuple[str, str]], file: str) -> Arguments:
    """Arguments that are not off, as `tools.launch` has them."""
    arguments: Arguments = {}
    for name, (text, _) in said.items():
        if text not in UNSET:
            key = key_of(OTHER_NAMES.get(name, name))
            value = True if text.lower() == "true" else text
            arguments[key] = Argument(name=key, value=value, source=f"{file}: {name}")
    if "num-query-groups" in arguments and "group_query_attention" not in said:
        # TransformerConfig has no switch for it.
        key = "group-query-attention"
        arguments[key] = Argument(name=key, value=True, source=f"{file}: num_query_groups")
    if "vocab-size" not in arguments and "padded-vocab-size" in arguments:
        arguments["vocab-size"] = arguments["padded-vocab-size"]
    return arguments
