"""Options of a user in one table: names, help texts, environment variables, rules.

Each option is a field of Megatron's TransformerConfig, hence a Megatron argument
(`--moe-monta-chain`), hence in Megatron's printed arguments and in its checkpoints. The
environment variable of the same name (MOE_MONTA_CHAIN) gives the default of that argument.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar

from monta_megatron.chains import CHAINS, DEFAULT_NUM_CHUNKS, Chain, check_chain, chunks_of
from monta_megatron.chains.layout import DEFAULT_CTAS, Ctas
from monta_megatron.chains.wire_format import quantized_passes
from monta_megatron.common.rules import require
from monta_megatron.planner.cluster import Cluster

if TYPE_CHECKING:
    from monta_megatron.planner.plan import Plan

T = TypeVar("T")

DISPATCHER_TYPE = "monta"
AUTO = "auto"
# Late enough for memory and communicators to be there.
DEFAULT_RECORD_ITERATION = 10
DEFAULT_TUNE_STEPS = 20
DEFAULT_CALIBRATE_S = 10.0
DEFAULT_WATCH_STEPS = 50
# The settings by which Megatron overlaps an exchange with computation.
SCHEDULE = "overlap_moe_expert_parallel_comm"
OVERLAPS = (SCHEDULE, "moe_shared_expert_overlap")


class Kind(NamedTuple):
    """Values of an option.

    Attributes:
        type: of the field of TransformerConfig.
        holds: whether a value is in range.
        rule: ends "must ...".
    """

    type: Any
    holds: Callable[[Any], bool]
    rule: str

    def read(self, text: str) -> Any:
        """Value of a text; one that is none stays, for `Options.of` to refuse in one line."""
        if self.type is bool:
            return {"1": True, "0": None}.get(text, text)
        try:
            return self.type(text)
        except ValueError:
            return text


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_path(value: Any) -> bool:
    # Code may pass a cluster itself.
    return bool(value) and isinstance(value, str | os.PathLike | Cluster)


NAME = Kind(str, _is_path, "be a name")
FILE = Kind(str, _is_path, "be a file")
FOLDER = Kind(str, _is_path, "be a folder")
KERNELS = Kind(str, lambda value: value in (AUTO, "torch", "fused"), "be auto, torch or fused")
FP8 = Kind(str, lambda value: value == "fp8", "be fp8, or left out")
FP32 = Kind(str, lambda value: value == "fp32", "be fp32, or left out")
COUNT = Kind(int, lambda value: type(value) is int and value >= 1, "be an integer >= 1")
STEPS = Kind(int, lambda value: type(value) is int and value >= 0, "be an integer >= 0; 0 is off")
ZERO_OR_ONE = Kind(int, lambda value: type(value) is int and value in (0, 1), "be 0 or 1")
GIGABYTES = Kind(float, lambda value: _is_number(value) and value > 0, "be a number > 0")
MICROSECONDS = Kind(float, _is_number, "be a number >= 0")
SECONDS = Kind(float, _is_number, "be a number >= 0; 0 is off")
SWITCH = Kind(bool, lambda value: type(value) is bool, "be a switch: 1 or 0")


def _option(kind: Kind, help_text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help_text})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one dispatcher, resolved and checked; each help text says what it is.

    Attributes:
        overlaps: the settings of Megatron that overlap the exchange with computation.
    """

    chain: str = _option(
        NAME,
        "Chain of the monta token dispatcher: auto (the planner chooses; default), "
        + ", ".join(CHAINS)
        + ".",
        AUTO,
    )
    num_chunks: int | None = _option(
        COUNT,
        "Number of chunks that the monta token dispatcher pipelines (default: the planner "
        f"chooses; {DEFAULT_NUM_CHUNKS} for a chain that is named, or 1 if it is serial).",
    )
    ranks_per_node: int | None = _option(
        COUNT,
        "Ranks joined by the node link (NVLink domain; default: as MONTA_NODE says, else those of "
        "the cluster file; without one, those of a host as NCCL finds it).",
    )
    cluster: Cluster | None = _option(
        FILE, "Cluster file, made by `monta calibrate`, or preset by which the planner chooses."
    )
    calibrate_seconds: float = _option(
        SECONDS,
        "Time in which auto measures the groups of its exchange at the start, over more than one "
        "node and without --moe-monta-cluster; kept in --save or the user's cache for the next "
        f"start. 0 takes the nearest preset (default: {DEFAULT_CALIBRATE_S:g}, and 0 on CPU ranks "
        "and in deterministic mode).",
        0.0,
    )
    plan: "Plan | None" = _option(
        FILE, "Plan file, made by `monta plan`, whose chain and number of chunks are used."
    )
    memory_limit_gb: float | None = _option(
        GIGABYTES,
        "What the planner expects an exchange to hold on a rank, at most, of the chain that it "
        "chooses (default: no limit).",
    )
    overlapped_compute_us: float = _option(
        MICROSECONDS,
        "Computation that overlaps the exchange of an MoE layer and micro-batch, forward and "
        "backward, in us: auto minimizes the exposed part. As in `monta plan`; only with "
        "--overlap-moe-expert-parallel-comm or --moe-shared-expert-overlap (default: what the "
        "iterations that are timed show).",
        0.0,
    )
    tune_steps: int = _option(
        STEPS,
        "Iterations, from the second on, in which the best candidates of auto take turns, one in "
        "an iteration, and are timed; the fastest is kept (default: "
        f"{DEFAULT_TUNE_STEPS}, and 0, which is off, in deterministic mode). The default makes 1 "
        "to 3 runs that count of each; where an iteration has few micro-batches, give more.",
        0,
    )
    plan_out: str | None = _option(
        FILE,
        "File for the plan that the tuning ends with, for --moe-monta-plan; replaced if it exists. "
        "Where there are several pipeline stages, each writes one, with its number before the "
        "suffix.",
    )
    watch_steps: int = _option(
        STEPS,
        "One iteration in so many is watched: its exchange is timed, and a link that becomes "
        f"slower is named (default: {DEFAULT_WATCH_STEPS} where auto chooses, outside of "
        "deterministic mode; else 0, which is off).",
        0,
    )
    watch_log: bool = _option(
        SWITCH,
        "Print what was watched last, in a line every --log-interval (environment: 1).",
        False,
    )
    watch_out: str | None = _option(
        FOLDER,
        "Folder for what is watched: a file for each exchange, with a line of JSON for each "
        "watched iteration.",
    )
    rail_ctas: int | None = _option(
        COUNT,
        "SMs that the NCCL communicator of a rail may keep busy (default: --moe-monta-max-ctas, "
        f"max_ctas of ep in --nccl-communicator-config-path, else {DEFAULT_CTAS.rail}).",
    )
    node_ctas: int | None = _option(
        COUNT,
        "SMs that the NCCL communicator of a node may keep busy (default: likewise, else "
        f"{DEFAULT_CTAS.node}).",
    )
    max_ctas: int | None = _option(COUNT, "Both of them, where they are not given themselves.")
    kernels: str = _option(
        KERNELS,
        "What copies and sums rows, to the same bits: torch (PyTorch's operations), fused (Triton "
        "kernels) or auto (fused on GPUs where every rank can build a Triton kernel, else torch; "
        "default).",
        AUTO,
    )
    wire_dtype: str | None = _option(
        FP8,
        "fp8: tokens travel to their experts in eight bits, e4m3 with a scale for every 128 "
        "values. That halves what dispatch sends and rounds what the experts get, so results are "
        "not those of stock; outputs and gradients travel as they are (default: so do tokens).",
    )
    wire_backward: bool = _option(
        SWITCH,
        "With --moe-monta-wire-dtype, the gradients of the experts' outputs travel like that too, "
        "in the backward pass of combine (environment: 1).",
        False,
    )
    combine_dtype: str | None = _option(
        FP32,
        "fp32: the last hop of combine carries partial sums unrounded, in twice the bytes of bf16; "
        "only for chains that sum the copies of a token (default: in the tokens' own dtype).",
    )
    check: int = _option(
        ZERO_OR_ONE,
        "1: the first exchange of each chain is compared with stock's, on random rows, and each "
        "fused kernel with PyTorch's operations; a difference ends the run (default). 0: neither.",
        1,
    )
    record: str | None = _option(
        FOLDER,
        "Folder in which every rank records one iteration of its first MoE layer, for "
        "`monta timeline`.",
    )
    record_iteration: int = _option(
        COUNT,
        "The iteration of --moe-monta-record, counted from the start of the run (default: "
        f"{DEFAULT_RECORD_ITERATION}).",
        DEFAULT_RECORD_ITERATION,
    )
    overlap_experts: bool = _option(
        SWITCH,
        "Run dispatch, experts and combine of an MoE layer as one pipeline: while a chunk is "
        "computed, the next one is dispatched and the last one combined. auto chooses whether and "
        "into how many chunks the layer is split; a named chain has to be one of tokens "
        "(environment: 1).",
        False,
    )
    max_nodes_per_token: int | None = _option(
        COUNT,
        "Nodes on which the experts of a token may lie, at most: its best experts name them. This "
        "changes the model (default: no limit).",
    )
    max_ranks_per_token: int | None = _option(COUNT, "The same for expert parallel ranks.")
    overlaps: tuple[str, ...] = ()

    @property
    def named_chain(self) -> Chain | None:
        """The chain that a flag or a plan names; None where the planner chooses."""
        name = self.chain if self.plan is None else self.plan.chain
        return None if name == AUTO else CHAINS[name]

    @property
    def ctas(self) -> dict[str, int | None]:
        """ "rail", "node" -> the budget of such a communicator; None leaves it to Megatron's."""
        return {"rail": self.rail_ctas or self.max_ctas, "node": self.node_ctas or self.max_ctas}

    def priced_ctas(self) -> Ctas:
        """The budgets that a plan is made for."""
        rail, node = (
            self.ctas[name] or default for name, default in DEFAULT_CTAS._asdict().items()
        )
        return Ctas(rail=rail, node=node)

    @property
    def limits_routing(self) -> bool:
        """Whether the experts of a token may lie on few nodes or ranks only."""
        return (self.max_nodes_per_token, self.max_ranks_per_token) != (None, None)

    @property
    def quantized_passes(self) -> frozenset[str]:
        """The passes whose rows travel in eight bits."""
        return quantized_passes(self.wire_dtype is not None, self.wire_backward)

    @classmethod
    def of(cls, source: object) -> "Options":
        """The options that `source`, a TransformerConfig or parsed arguments, carries.

        Raises:
            ValueError: one is out of range; the message names option, value and rule.
        """
        given = {
            name: value
            for name in KINDS
            if (value := getattr(source, f"moe_monta_{name}", None)) is not None
        }

        def check(name: str, holds: bool, rule: str) -> None:
            if name in given:
                require(holds, f"moe_monta_{name}", repr(given[name]), rule)

        for name, value in given.items():
            check(name, KINDS[name].holds(value), KINDS[name].rule)
        chain, overlaps = given.get("chain", AUTO), _overlaps(source)
        check_chain(chain, "moe_monta_chain", also=(AUTO,))
        is_auto = chain == AUTO and "plan" not in given
        names_chain = "where a flag or a plan names the chain, which is used"
        check("memory_limit_gb", is_auto, f"be left out {names_chain} whatever it holds")
        check("wire_backward", "wire_dtype" in given, "come with moe_monta_wire_dtype")
        overlapped_compute_us, calibrate_s = (
            given.get("overlapped_compute_us"),
            given.get("calibrate_seconds"),
        )
        check(
            "overlapped_compute_us",
            overlapped_compute_us == 0 or is_auto,
            f"be 0 or left out {names_chain} as it is",
        )
        check(
            "overlapped_compute_us",
            overlapped_compute_us == 0 or overlaps != (),
            f"be 0 or left out without {' or '.join(OVERLAPS)}, as nothing hides the exchange then",
        )
        check("record_iteration", "record" in given, "come with moe_monta_record")
        needs_costs = is_auto and "cluster" not in given
        check(
            "calibrate_seconds",
            calibrate_s == 0 or needs_costs,
            "be 0 or left out beside a cluster file, or where a flag or a plan names the chain",
        )
        if needs_costs:
            given.setdefault("calibrate_seconds", _default_calibrate_s(source))
        # Times differ between runs, which deterministic mode is to do alike.
        is_off = getattr(source, "deterministic_mode", False) or given.get("overlap_experts")
        is_timed = is_auto and not is_off
        tune_steps = given.setdefault("tune_steps", DEFAULT_TUNE_STEPS if is_timed else 0)
        watch_steps = given.setdefault("watch_steps", DEFAULT_WATCH_STEPS if is_timed else 0)
        check(
            "watch_steps",
            watch_steps == 0 or not given.get("overlap_experts"),
            "be 0 or left out with moe_monta_overlap_experts, whose passes are not timed",
        )
        check("tune_steps", tune_steps == 0 or is_auto, f"be 0 or left out {names_chain} as it is")
        if "plan_out" in given:
            check("plan_out", tune_steps > 0, "be left out without tuning, which writes it")
            out = Path(given["plan_out"])
            can_be_written = out.absolute().parent.is_dir() and not out.is_dir()
            check("plan_out", can_be_written, "be a file in a folder that exists")
        if "plan" in given:
            for name in ("chain", "num_chunks"):
                check(name, False, "be left out beside moe_monta_plan, which holds it")
            from monta_megatron.planner.plan import Plan

            given["plan"] = _once(Plan.load, given["plan"])
        if chain != AUTO:
            given["num_chunks"] = chunks_of(
                CHAINS[chain], given.get("num_chunks"), "moe_monta_num_chunks"
            )
        named = given["plan"].chain if "plan" in given else chain
        check(
            "combine_dtype",
            named == AUTO or CHAINS[named].rows == "tokens",
            f"be left out with {named}, which sums no copies of a token on the way",
        )
        if given.get("overlap_experts") or getattr(given.get("plan"), "experts_pipelined", False):
            from monta_megatron.integration.experts import check_options

            check_options(given, chain)
        # Code may pass a `Cluster` itself instead of a file.
        if "cluster" in given and not isinstance(given["cluster"], Cluster):
            from monta_megatron.common import presets
            from monta_megatron.planner.cluster_file import load_cluster

            given["cluster"] = _once(load_cluster, presets.find("clusters", given["cluster"]))
        return cls(**given, overlaps=overlaps)


# By name without its prefix.
KINDS: dict[str, Kind] = {
    entry.name: entry.metadata["kind"] for entry in fields(Options) if "kind" in entry.metadata
}
OPTION_NAMES = tuple(f"moe_monta_{name}" for name in KINDS)


def _argument(name: str, kind: Kind, help_text: str) -> Any:
    """A field of TransformerConfig, from which Megatron makes an argument; None: not given."""
    # Megatron reads help texts from its class's source, which does not contain these fields.
    meta: dict[str, Any] = {"help": help_text, "type": kind.read}
    if kind is SWITCH:
        # Megatron would make `--no-...` of a field whose default is not False.
        flag = f"--{name.replace('_', '-')}"
        meta = {"help": help_text, "action": "store_true", "arg_names": [flag]}
    # With `Optional`, the form that Megatron's argument factory understands.
    return name, Optional[kind.type], field(default=None, metadata={"argparse_meta": meta})  # noqa: UP045


# The fields that a TransformerConfig gains.
OptionFields = make_dataclass(
    "OptionFields",
    [
        _argument(f"moe_monta_{entry.name}", entry.metadata["kind"], entry.metadata["help"])
        for entry in fields(Options)
        if entry.name in KINDS
    ],
    kw_only=True,
)


def defaults_from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Defaults of the option fields, from MOE_MONTA_CHAIN and the like; None where unset."""
    texts = {name: environ.get(f"MOE_MONTA_{name.upper()}") for name in KINDS}
    return {
        f"moe_monta_{name}": KINDS[name].read(text) if text else None
        for name, text in texts.items()
    }


def _default_calibrate_s(source: object) -> float:
    """Times differ between runs, and on CPU ranks, which share cores, between seconds."""
    import torch

    is_off = getattr(source, "deterministic_mode", False) or not torch.accelerator.is_available()
    return 0.0 if is_off else DEFAULT_CALIBRATE_S


def _overlaps(source: object) -> tuple[str, ...]:
    """Settings of `OVERLAPS` that are on."""
    settings = [name for name in OVERLAPS if getattr(source, name, False)]
    if getattr(source, "moe_shared_expert_intermediate_size", None) is None:
        settings = settings[: settings.count(OVERLAPS[0])]
    return tuple(settings)


def _once(read: Callable[[str | Path], T], path: str | Path) -> T:
    """Content of a file, read once per process unless it changes: every layer asks for it."""
    # `read` says what is wrong with a file that does not exist.
    changed = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
    return _as_of(read, path, changed)


@cache
def _as_of(read: Callable[[str | Path], T], path: str | Path, changed: int) -> T:
    return read(path)
