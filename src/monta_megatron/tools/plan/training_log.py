"""Read a training's log: what its loop printed of arguments, world size and iterations.

Megatron-LM prints its arguments in a block of `name .... value`, Megatron Bridge its configuration
as YAML, or what differs from the defaults as `name: value` under `[model]`. Both print `iteration
7/ 100 | ... elapsed time per iteration (ms): 8600.1 |`. Labels of torchrun, srun, mpirun,
Kubernetes and Ray may stand in front of a line, and colours inside it. Of a training that was
started again in the same file, the last start counts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from monta_megatron.planner.models.model import Reader
from monta_megatron.tools.launch.log import ITERATION, TIME_MS, not_repeated

COLOUR = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
# Ray says so behind a line that several actors print.
REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
DOTTED = re.compile(r"(?:^|[\s\]:>|)])([a-z][a-z0-9_]*) \.{2,} (.*)$")
KEY = re.compile(r"(?:^|[\s\]:>|)])([a-z][a-z0-9_]*):(?: +([^\s{|][^{|]*))?$")
ITEM = re.compile(r"(?:^|[\s\]:>|)])- (\S+)$")
DEFAULT = re.compile(r" +\(Mcore default: .*$")
SECTION = re.compile(r"\[([a-z]+)\](?::$| Non-default values )")
WORLD_SIZE = re.compile(r"\busing world size: *(\d+)")
# With one of these a training starts.
START = re.compile(rf"{WORLD_SIZE.pattern}|- arguments -|(?:^|[\s\]:>|)])model:$|\[model\] Non")
# Places of a configuration whose keys are read.
PLACES = (("model",), ("model", "transformer"), ("train",))
# Of TransformerConfig -> Megatron's argument.
OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "gated_linear_unit": "swiglu",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
SIZES = {
    "tp": "tensor-model-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
    "cp": "context-parallel-size",
    "pp": "pipeline-model-parallel-size",
}
# One of these is in every line that says something, which is found faster than by expressions.
MARKS = ("iteration", " ..", ": ", ":\n", "- ")
LONGEST_LINE = 4096
UNSET = ("None", "null", "False", "false", "")
FORMATS = (
    (b"\x1f\x8b", "gzip; unpack it"),
    (b"\x28\xb5\x2f\xfd", "zstd; unpack it"),
    (b"\xfd7zXZ", "xz; unpack it"),
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


@dataclass
class _Start:
    """What was printed since a training started.

    Attributes:
        said: values by their names, as texts.
        timed: number and milliseconds of each iteration.
        world_size: as Megatron prints it, or None.
        inside: column and name of the keys that a line of YAML stands under.
    """

    said: dict[str, str] = field(default_factory=dict)
    timed: list[tuple[int, float]] = field(default_factory=list)
    world_size: int | None = None
    inside: list[tuple[int, str]] = field(default_factory=list)

    def read(self, line: str) -> None:
        """Take in what a line says; most say nothing."""
        if (iteration := ITERATION.search(line)) is not None:
            if (ms := TIME_MS.search(line)) is not None:
                self.timed.append((int(iteration[1]), float(ms[1])))
        elif (dotted := DOTTED.search(line)) is not None:
            self.said[dotted[1]] = dotted[2].strip()
        elif (world := WORLD_SIZE.search(line)) is not None:
            self.world_size = int(world[1])
        elif (section := SECTION.search(line)) is not None:
            self.inside = [(-1, section[1])]
        elif (item := ITEM.search(line)) is not None:
            *above, name = self._names or ("",)
            if tuple(above) in PLACES:
                self.said[name] = f"{self.said.get(name, '[').rstrip(']')}{item[1]},]"
        elif (key := KEY.search(DEFAULT.sub("", line))) is not None:
            self._read_key(key.start(1), key[1], key[2])

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.inside)

    def _read_key(self, column: int, name: str, value: str | None) -> None:
        while self.inside and column <= self.inside[-1][0]:
            self.inside.pop()
        if value is None:
            self.inside.append((column, name))
            self.said.pop(name, None)
        elif self._names in PLACES or (name == "data_parallel_size" and not self.inside):
            self.said[name] = value.strip().strip("'\"")


def read_training_log(path: Path) -> TrainingLog:
    """Read a log line by line; what is no line of a training's loop is passed over.

    Raises:
        ValueError: it cannot be read, or holds no timed iteration.
    """
    last = start = _Start()
    for line in _lines(path):
        if start.timed and START.search(line) is not None:
            last, start = start, _Start()
        start.read(line)
    if not start.timed:
        start = last
    times_ms = tuple(ms for _, ms in not_repeated(start.timed))
    if not times_ms:
        raise ValueError(
            f"--log: {path}: holds no timed iteration, must be the output of a training by "
            "Megatron-LM or Megatron Bridge: `iteration N/ M | ... elapsed time per iteration "
            "(ms): X |`"
        )
    return TrainingLog(
        file=f"--log: {path}",
        arguments=_arguments(start.said),
        printed_world_size=start.world_size,
        times_ms=times_ms,
    )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            start = file.read(8)
        for mark, what in FORMATS:
            if start.startswith(mark):
                raise ValueError(f"--log: {path}: is {what}, must be the text that was printed")
        if b"\0" in start:
            raise ValueError(f"--log: {path}: is no text, must be the text that was printed")
        with path.open(encoding="utf-8", errors="replace") as text:
            for line in text:
                if len(line) < LONGEST_LINE and any(mark in line for mark in MARKS):
                    line = COLOUR.sub("", line) if "\x1b" in line else line
                    yield (REPEATED.sub("", line) if "[repeated" in line else line).rstrip()
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
    if said.get("share_embeddings_and_output_weights", "").lower() == "false":
        arguments["untie-embeddings-and-output-weights"] = True
    if "padded-vocab-size" in arguments:
        arguments.setdefault("vocab-size", arguments["padded-vocab-size"])
    return arguments
