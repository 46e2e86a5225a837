"""Read a training's log: what its loop printed of arguments, world size and iterations.

Megatron-LM prints its arguments in a block of `name .... value`, Megatron Bridge its configuration
as YAML. Both print `iteration 7/ 100 | ... elapsed time per iteration (ms): 8600.1 |`. Labels of
torchrun, srun, mpirun, Kubernetes and Ray may stand in front of a line, and colours inside it. A
training that was started again goes on in the same file.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from monta_megatron.planner.models.model import Reader
from monta_megatron.tools.launch.log import ITERATION, TIME_MS, not_repeated

COLOUR = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
# Ray says so behind a line that several actors print.
REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
DOTTED = re.compile(r"(?:^|[\s\]:>|)])([a-z][a-z0-9_]*) \.{2,} (.*)$")
YAML = re.compile(r"(?:^|[\s\]>|)])([a-z][a-z0-9_]*): +([^\s{][^|{]*)$")
WORLD_SIZE = re.compile(r"\busing world size: *(\d+)")
# Of TransformerConfig -> Megatron's argument.
OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "gated_linear_unit": "swiglu",
}
SIZES = {
    "tp": "tensor-model-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
    "cp": "context-parallel-size",
    "pp": "pipeline-model-parallel-size",
}
# Names that are read where they stand in YAML, and their endings; other lines may be anything.
OF_YAML = {"bf16", "fp16", "seq_length", "num_moe_experts", "multi_latent_attention"}
OF_YAML |= {"gated_linear_unit", "attention_output_gate", "moe_shared_expert_overlap"}
OF_YAML |= {"overlap_moe_expert_parallel_comm", "moe_token_dispatcher_type", "kv_channels"}
ENDINGS = ("_size", "_layers", "_heads", "_groups", "_topk", "_rank", "_dim", "_freq", "_dtype")
# One of these is in every line that says something, which is found faster than by expressions.
MARKS = ("iteration", " ..", ": ")
LONGEST_LINE = 4096
UNSET = ("None", "null", "False", "false", "")
FORMATS = (
    (b"\x1f\x8b", "gzip; unpack it"),
    (b"\x28\xb5\x2f\xfd", "zstd; unpack it"),
    (b"\xff\xfe", "UTF-16; convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16; convert it to UTF-8"),
    (b'{"log":', "JSON lines of docker; `docker logs` prints the text"),
)


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """The last training of a log.

    Attributes:
        file: the log.
        arguments: Megatron's arguments by their names with dashes.
        printed_world_size: all ranks, as Megatron prints them at the start, or None.
        times_ms: of each iteration, in order.
    """

    file: str
    arguments: Mapping[str, Any]
    printed_world_size: int | None
    times_ms: tuple[float, ...]

    @property
    def iteration_ms(self) -> float:
        """Median without the first tenth, in which everything starts."""
        return median(self.times_ms[max(1, len(self.times_ms) // 10) :] or self.times_ms)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the layout by their short names; Megatron's ETP is TP where it is not given."""
        read = Reader(self.arguments, self.file)
        tp = read.size(SIZES["tp"], 1)
        return {
            name: read.size(argument, tp if name == "etp" else 1)
            for name, argument in SIZES.items()
        }

    @property
    def world_size(self) -> int | None:
        """All ranks; None where neither they nor the data parallel ranks are said."""
        read, sizes = Reader(self.arguments, self.file), self.sizes
        dp = read.optional("data-parallel-size")
        of_dp = None if dp is None else dp * sizes["tp"] * sizes["cp"] * sizes["pp"]
        return self.printed_world_size or read.optional("world-size") or of_dp

    @property
    def overlaps(self) -> tuple[str, ...]:
        """Settings by which computation hides a part of the exchange."""
        read = Reader(self.arguments, self.file)
        shared = read.value("moe-shared-expert-intermediate-size") is not None
        names = ["overlap-moe-expert-parallel-comm"]
        names += ["moe-shared-expert-overlap"] * shared
        return tuple(name for name in names if read.flag(name))


def read_training_log(path: Path) -> TrainingLog:
    """Read a log line by line; what is no line of a training's loop is passed over.

    Raises:
        ValueError: it cannot be read, or holds no timed iteration.
    """
    said: dict[str, str] = {}
    timed: list[tuple[int, float]] = []
    world_size = None
    for line in _lines(path):
        if (iteration := ITERATION.search(line)) is not None:
            if (ms := TIME_MS.search(line)) is not None:
                timed.append((int(iteration[1]), float(ms[1])))
        elif (dotted := DOTTED.search(line)) is not None:
            said[dotted[1]] = dotted[2].strip()
        elif (world := WORLD_SIZE.search(line)) is not None:
            world_size = int(world[1])
        elif (found := YAML.search(line)) is not None and _is_read(found[1]):
            said[found[1]] = found[2].strip()
    times_ms = tuple(ms for _, ms in not_repeated(timed))
    if not times_ms:
        raise ValueError(
            f"--log: {path}: holds no timed iteration, must be the output of a training by "
            "Megatron-LM or Megatron Bridge: `iteration N/ M | ... elapsed time per iteration "
            "(ms): X |`"
        )
    return TrainingLog(
        file=f"--log: {path}",
        arguments=_arguments(said),
        printed_world_size=world_size,
        times_ms=times_ms,
    )


def _is_read(name: str) -> bool:
    return name in OF_YAML or name.endswith(ENDINGS)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            start = file.read(8)
        for mark, what in FORMATS:
            if start.startswith(mark):
                raise ValueError(f"--log: {path}: is {what}, must be the text that was printed")
        with path.open(encoding="utf-8", errors="replace") as text:
            for line in text:
                if len(line) < LONGEST_LINE and any(mark in line for mark in MARKS):
                    line = COLOUR.sub("", line) if "\x1b" in line else line
                    yield REPEATED.sub("", line) if "[repeated" in line else line
    except OSError as error:
        raise ValueError(f"--log: {path}: cannot be read: {error.strerror}") from error


def _arguments(said: Mapping[str, str]) -> dict[str, Any]:
    """Arguments that are not off, by Megatron's names."""
    arguments: dict[str, Any] = {}
    for name, text in said.items():
        if text not in UNSET:
            key = OTHER_NAMES.get(name, name).replace("_", "-")
            arguments[key] = True if text.lower() == "true" else text
    if "num-query-groups" in arguments and "group_query_attention" not in said:
        # TransformerConfig has no switch for it.
        arguments["group-query-attention"] = True
    if "padded-vocab-size" in arguments:
        arguments.setdefault("vocab-size", arguments["padded-vocab-size"])
    return arguments
