"""Logs of trainings: iterations, losses, memory and chain; and the request to plan what was run.

Megatron-LM prints its arguments in a block of `name .... value`, Megatron Bridge its configuration
as YAML, or what differs from the defaults as `name: value` under `[model]`. Both print `iteration
7/ 100 | ... elapsed time per iteration (ms): 8600.1 |`. Labels of launchers may stand in front of a
line, and colours inside it. Of a training that was started again, the last start counts.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from monta_megatron.common.errors import UserError
from monta_megatron.planner.layout import PARALLEL_ARGUMENTS
from monta_megatron.planner.model import Reader, model_of
from monta_megatron.tools.launch.run_config import DISPATCHER
from monta_megatron.tools.plan.request import PlanRequest

# Megatron's line: `iteration 2/ 10 | ... | elapsed time per iteration (ms): 81.4 | ... |
# lm loss: 5.4E+00 | ...`.
ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ \|")
TIME_MS = re.compile(r"elapsed time per iteration \(ms\): (\d+(?:\.\d+)?)")
LOSS = re.compile(r"\blm loss: (-?\d+(?:\.\d+)?(?:E[-+]\d+)?|nan|-?inf)(?=[\s|])", re.IGNORECASE)
# `(after 2 iterations) memory (MB) | ... | max allocated: 951.91 | ...`, of some of the ranks.
PEAK_MIB = re.compile(r"\bmemory \(MB\) \|.*?\| max allocated: (\d+(?:\.\d+)?)")
# The dispatcher's lines: `monta: alltoall in 1 chunk, EP 8 x ETP 1 over 2 nodes: as asked for`;
# `monta: auto, EP 8 x ETP 1 over 2 nodes: alltoall in 1 chunk, planned on ...`; `... wins with`.
CHAIN = re.compile(
    r"^(?:\[node \d+ rank \d+\] )?monta(?:, rank \d+)?: (?:auto, [^:]+: )?"
    r"(\w+ in \d+ chunks?(?: with their experts)?)(?:, EP |, planned on | wins with )",
    re.MULTILINE,
)
# Colours, and what Ray says behind a line that several actors print, and Bridge behind a value.
NOISE = re.compile(r"\x1b\[[\d;]*[A-Za-z]|\s*\[repeated \d+x across cluster\].*$| +\(Mcore def.*$")
LABEL = r"(?:^|[\s\]:>|)])"
DOTTED = re.compile(LABEL + r"([a-z][a-z0-9_]*) \.{2,} (.*)$")
KEY = re.compile(LABEL + r"([a-z][a-z0-9_]*):(?: +([^\s{|][^{|]*))?$")
ITEM = re.compile(LABEL + r"- (\S+)$")
SECTION = re.compile(r"\[([a-z]+)\](?::$| Non-default values )")
# With one of these a training starts.
START = re.compile(rf"- arguments -|{LABEL}model:$|\[model\] Non")
LONGEST_LINE = 4096
# Places of a configuration whose keys are read.
PLACES = (("model",), ("model", "transformer"), ("train",))
UNSET = ("None", "null", "False", "false", "")
# Fields of a request.
SIZES = {
    **PARALLEL_ARGUMENTS,
    "world_size": "world-size",
    "ranks_per_node": "moe-monta-ranks-per-node",
    "global_batch_size": "global-batch-size",
}
# Of TransformerConfig -> Megatron's argument.
OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "padded_vocab_size": "vocab_size",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
# Logged iterations of a start in which connections, buffers and plans are made.
NUM_WARMUP = 2


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """The last start of a training in a log.

    Attributes:
        said: name -> text of each argument or configuration value.
        times_ms: iteration -> time of the iteration, where it was logged.
        losses: iteration -> loss, rounded to seven digits by Megatron.
        peak_memory_bytes: peak allocated memory of any rank, as Megatron last logged it; None if it
            never did.
        chain: chain that ran last, in the dispatcher's words: "alltoall in 1 chunk".
    """

    said: Mapping[str, str]
    times_ms: Mapping[int, float]
    losses: Mapping[int, float]
    peak_memory_bytes: float | None
    chain: str | None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that are not off, by Megatron's names with dashes."""
        arguments: dict[str, Any] = {
            OTHER_NAMES.get(name, name).replace("_", "-"): text.lower() == "true" or text
            for name, text in self.said.items()
            if text not in UNSET
        }
        if "num-query-groups" in arguments and "group_query_attention" not in self.said:
            # TransformerConfig has no switch for it.
            arguments["group-query-attention"] = True
        if self.said.get("share_embeddings_and_output_weights", "").lower() == "false":
            arguments["untie-embeddings-and-output-weights"] = True
        return arguments

    def request(self, request: PlanRequest, name: str) -> PlanRequest:
        """The request with what the log says; what the request says itself stays.

        Args:
            request: what was asked for.
            name: what the plan calls the training, such as the log's path.

        Raises:
            UserError: the log lacks an argument, or all of them.
        """
        if not {"num-layers", "hidden-size"} & self.arguments.keys():
            raise UserError(
                f"{name}: holds no arguments of the training, must begin with those that "
                "Megatron-LM or Megatron Bridge prints before the first iteration"
            )
        read = Reader(self.arguments, "--log")
        sizes: dict[str, Any] = {
            size: getattr(request, size) or read.optional(argument)
            for size, argument in SIZES.items()
        }
        # Megatron's own defaults.
        sizes["tp"] = sizes["tp"] or 1
        sizes["etp"] = sizes["etp"] or sizes["tp"]
        if sizes["world_size"] is None:
            raise UserError("--world-size: not given, must be, as the log names none")
        model = model_of(self.arguments, name, "--log")
        return replace(request, model=model, **sizes)

    def iteration_ms(self, num_warmup: int = NUM_WARMUP) -> float:
        """The median iteration without the warm-up; of all, where there are no others."""
        times_ms = list(self.times_ms.values())
        return median(times_ms[num_warmup:] or times_ms)

    @property
    def dispatcher(self) -> str:
        """The dispatcher that ran, by Megatron's name."""
        return self.said.get(DISPATCHER.replace("-", "_"), "allgather")


def read_log(path: Path) -> TrainingLog:
    """Read the log of a training.

    Raises:
        UserError: it cannot be read, or holds no timed iteration.
    """
    try:
        log = parse_log(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not log.times_ms:
        raise UserError(
            f"{path}: holds no `iteration N/ M | ... elapsed time per iteration (ms): X |`, must "
            "be the text, not packed, that Megatron-LM or Megatron Bridge printed"
        )
    return log


def parse_log(text: str) -> TrainingLog:
    """The last start in a log, or in a part of one; lines of other kinds are passed over."""
    lines: list[str] = []
    iterations: dict[int, str] = {}
    for line in text.splitlines():
        if len(line) >= LONGEST_LINE:
            continue
        line = NOISE.sub("", line).rstrip()
        if iterations and START.search(line):
            lines, iterations = [], {}
        lines.append(line)
        # A line that is cut says nothing of the iteration that it names.
        if (match := ITERATION.search(line)) and TIME_MS.search(line):
            iterations[int(match[1])] = line
    text = "\n".join(lines)
    peaks_mib = [float(peak) for peak in PEAK_MIB.findall(text)]
    return TrainingLog(
        said=_values(lines),
        times_ms=_numbers(TIME_MS, iterations),
        losses=_numbers(LOSS, iterations),
        # A rank without an accelerator says 0.
        peak_memory_bytes=max(peaks_mib, default=0.0) * 2**20 or None,
        chain=next(reversed(CHAIN.findall(text)), None),
    )


def _numbers(pattern: re.Pattern[str], lines: Mapping[int, str]) -> dict[int, float]:
    """The number of each iteration, where its line has one."""
    return {n: float(match[1]) for n, line in lines.items() if (match := pattern.search(line))}


def _values(lines: Iterable[str]) -> dict[str, str]:
    """Values by their names, as a block of arguments or a configuration holds them."""
    values: dict[str, str] = {}
    # Column and name of the keys that a line of YAML stands under.
    inside: list[tuple[int, str]] = []
    for line in lines:
        if dotted := DOTTED.search(line):
            values[dotted[1]] = dotted[2].strip()
        elif section := SECTION.search(line):
            inside = [(-1, section[1])]
        elif item := ITEM.search(line):
            *above, name = [name for _, name in inside] or [""]
            if tuple(above) in PLACES:
                values[name] = f"{values.get(name, '').rstrip(']') or '['}{item[1]},]"
        elif key := KEY.search(line):
            while inside and key.start(1) <= inside[-1][0]:
                inside.pop()
            if tuple(name for _, name in inside) in PLACES:
                values[key[1]] = (key[2] or "").strip().strip("'\"")
            if key[2] is None:
                inside.append((key.start(1), key[1]))
    return values
