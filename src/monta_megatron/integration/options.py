"""Options of a user in one place: names, environment variables, rules.

Each option is a field of Megatron's TransformerConfig, hence a Megatron argument
(`--moe-monta-chain`), hence in Megatron's printed arguments and in its checkpoints. The
environment variable of the same name (MOE_MONTA_CHAIN) gives the default of that argument.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TypeVar

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
# The settings by which Megatron runs other work beside an exchange.
OVERLAPS = ("overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap")
# A chain's name or a file; code may pass a cluster itself.
_FILE_TYPES = (str, os.PathLike, Cluster)


def _or_text(number: Callable[[str], T]) -> Callable[[str], T | str]:
    """Reads a number; other texts stay, for `Options.of` to refuse in one line."""

    def read(text: str) -> T | str:
        try:
            return number(text)
        except ValueError:
            return text

    return read


def _option(help_text: str, convert: Callable[[str], Any] = str) -> Any:
    # Megatron reads help texts from its class's source, which does not contain these fields.
    meta = {"help": help_text, "type": convert}
    return field(default=None, metadata={"argparse_meta": meta, "read": convert})


def _switch(name: str, help_text: str) -> Any:
    # Megatron would make `--no-...` of a field whose default is not False.
    argument = f"--{name.replace('_', '-')}"
    meta = {"help": help_text, "action": "store_true", "arg_names": [argument]}
    return field(default=None, metadata={"argparse_meta": meta, "read": _yes_or_no})


def _yes_or_no(text: str) -> bool | str | None:
    """Reads a switch; other texts stay, see `_or_text`."""
    return {"1": True, "0": None}.get(text, text)


@dataclass(kw_only=True)
class OptionFields:
    """The fields that a TransformerConfig gains; None means not given.

    Written with `Optional`, which is the form that Megatron's argument factory understands.
    """

    moe_monta_chain: Optional[str] = _option(  # noqa: UP045
        "Chain of the monta token dispatcher: auto (the planner chooses; default), "
        + ", ".join(CHAINS)
        + "."
    )
    moe_monta_num_chunks: Optional[int] = _option(  # noqa: UP045
        "Number of chunks that the monta token dispatcher pipelines (default: the planner "
        f"chooses; {DEFAULT_NUM_CHUNKS} for a chain that is named, or 1 if it is serial).",
        _or_text(int),
    )
    moe_monta_ranks_per_node: Optional[int] = _option(  # noqa: UP045
        "Ranks joined by the node link (NVLink domain; default: as MONTA_NODE says, else those of "
        "the cluster file; without one, those of a host as NCCL finds it).",
        _or_text(int),
    )
    moe_monta_cluster: Optional[str] = _option(  # noqa: UP045
        "Cluster file, made by `monta calibrate`, or preset by which the planner chooses."
    )
    moe_monta_calibrate_seconds: Optional[float] = _option(  # noqa: UP045
        "Time in which auto measures the groups of its exchange at the start, over more than one "
        "node and without --moe-monta-cluster; kept in --save or the user's cache for the next "
        f"start. 0 takes the nearest preset (default: {DEFAULT_CALIBRATE_S:g}, and 0 on CPU ranks "
        "and in deterministic mode).",
        _or_text(float),
    )
    moe_monta_plan: Optional[str] = _option(  # noqa: UP045
        "Plan file, made by `monta plan`, whose chain and number of chunks are used."
    )
    moe_monta_memory_limit_gb: Optional[float] = _option(  # noqa: UP045
        "What the planner expects an exchange to hold on a rank, at most, of the chain that it "
        "chooses (default: no limit).",
        _or_text(float),
    )
    moe_monta_beside_us: Optional[float] = _option(  # noqa: UP045
        "Other work that runs beside the exchange of an MoE layer and micro-batch, forward and "
        "backward, in us: auto minimizes what it leaves over. As in `monta plan`; only with "
        "--overlap-moe-expert-parallel-comm or --moe-shared-expert-overlap (default: 0).",
        _or_text(float),
    )
    moe_monta_tune_steps: Optional[int] = _option(  # noqa: UP045
        "Iterations, from the second on, in which the best candidates of auto take turns, one in "
        "an iteration, and are timed; the fastest is kept (default: "
        f"{DEFAULT_TUNE_STEPS}, and 0, which is off, in deterministic mode). The default makes 1 "
        "to 3 runs that count of each; where an iteration has few micro-batches, give more.",
        _or_text(int),
    )
    moe_monta_plan_out: Optional[str] = _option(  # noqa: UP045
        "File for the plan that the tuning ends with, for --moe-monta-plan; replaced if it exists. "
        "Where there are several pipeline stages, each writes one, with its number before the "
        "suffix."
    )
    moe_monta_watch_steps: Optional[int] = _option(  # noqa: UP045
        "One iteration in so many is watched: its exchange is timed, and a link that becomes "
        f"slower is named (default: {DEFAULT_WATCH_STEPS} where auto chooses, outside of "
        "deterministic mode; else 0, which is off).",
        _or_text(int),
    )
    moe_monta_watch_log: Optional[bool] = _switch(  # noqa: UP045
        "moe_monta_watch_log",
        "Print what was watched last, in a line every --log-interval (environment: 1).",
    )
    moe_monta_watch_out: Optional[str] = _option(  # noqa: UP045
        "Folder for what is watched: a file for each exchange, with a line of JSON for each "
        "watched iteration."
    )
    moe_monta_rail_ctas: Optional[int] = _option(  # noqa: UP045
        "SMs that the NCCL communicator of a rail may keep busy (default: --moe-monta-max-ctas, "
        f"max_ctas of ep in --nccl-communicator-config-path, else {DEFAULT_CTAS.rail}).",
        _or_text(int),
    )
    moe_monta_node_ctas: Optional[int] = _option(  # noqa: UP045
        "SMs that the NCCL communicator of a node may keep busy (default: likewise, else "
        f"{DEFAULT_CTAS.node}).",
        _or_text(int),
    )
    moe_monta_max_ctas: Optional[int] = _option(  # noqa: UP045
        "Both of them, where they are not given themselves.",
        _or_text(int),
    )
    moe_monta_kernels: Optional[str] = _option(  # noqa: UP045
        "What copies and sums rows, to the same bits: torch (PyTorch's operations), fused (Triton "
        "kernels) or auto (fused on GPUs where every rank can build a Triton kernel, else torch; "
        "default)."
    )
    moe_monta_wire_dtype: Optional[str] = _option(  # noqa: UP045
        "fp8: tokens travel to their experts in eight bits, e4m3 with a scale for every 128 "
        "values. That halves what dispatch sends and rounds what the experts get, so results are "
        "not those of stock; outputs and gradients travel as they are (default: so do tokens)."
    )
    moe_monta_wire_backward: Optional[bool] = _switch(  # noqa: UP045
        "moe_monta_wire_backward",
        "With --moe-monta-wire-dtype, the gradients of the experts' outputs travel like that too, "
        "in the backward pass of combine (environment: 1).",
    )
    moe_monta_combine_dtype: Optional[str] = _option(  # noqa: UP045
        "fp32: the last hop of combine carries partial sums unrounded, in twice the bytes of bf16; "
        "only for chains that sum the copies of a token (default: in the tokens' own dtype)."
    )
    moe_monta_check: Optional[int] = _option(  # noqa: UP045
        "1: the first exchange of each chain is compared with stock's, on random rows, and each "
        "fused kernel with PyTorch's operations; a difference ends the run (default). 0: neither.",
        _or_text(int),
    )
    moe_monta_record: Optional[str] = _option(  # noqa: UP045
        "Folder in which every rank records one iteration of its first MoE layer, for "
        "`monta timeline`."
    )
    moe_monta_record_iteration: Optional[int] = _option(  # noqa: UP045
        "The iteration of --moe-monta-record, counted from the start of the run (default: "
        f"{DEFAULT_RECORD_ITERATION}).",
        _or_text(int),
    )
    moe_monta_overlap_experts: Optional[bool] = _switch(  # noqa: UP045
        "moe_monta_overlap_experts",
        "Run dispatch, experts and combine of an MoE layer as one pipeline: while a chunk is "
        "computed, the next one is dispatched and the last one combined. auto chooses whether and "
        "into how many chunks the layer is split; a named chain has to be one of tokens "
        "(environment: 1).",
    )
    moe_monta_max_nodes_per_token: Optional[int] = _option(  # noqa: UP045
        "Nodes on which the experts of a token may lie, at most: its best experts name them. This "
        "changes the model (default: no limit).",
        _or_text(int),
    )
    moe_monta_max_ranks_per_token: Optional[int] = _option(  # noqa: UP045
        "The same for expert parallel ranks.", _or_text(int)
    )


OPTION_NAMES = tuple(entry.name for entry in fields(OptionFields))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one dispatcher, resolved and checked.

    Attributes:
        chain: key of `chains.CHAINS`, or "auto".
        num_chunks: at least 1; None where the planner chooses.
        ranks_per_node: ranks joined by the node link; None leaves it to MONTA_NODE, the cluster,
            the launcher or host names.
        cluster: costs by which the planner chooses, or None if no file gives them.
        calibrate_seconds: time to measure the costs in their absence; 0 takes the nearest preset.
        plan: a plan that was made before, or None.
        memory_limit_gb: limit for the planner, or None.
        beside_us: other work beside an exchange; 0 for none.
        overlaps: the settings of Megatron by which other work runs beside it.
        rail_ctas, node_ctas: budgets of these communicators, or None.
        max_ctas: the budget of those that have none; None leaves it to Megatron's settings.
        kernels: what copies and sums rows: "auto", "torch" or "fused".
        wire_dtype: in which tokens travel to their experts, or None for their own.
        wire_backward: whether the gradients of the experts' outputs do so, too.
        combine_dtype: "fp32" where the last hop of combine carries unrounded sums, or None.
        check: compare the first exchange of each chain with stock's.
        record: folder for what is recorded of an iteration, or None.
        record_iteration: that iteration, the first one being 1.
        tune_steps: iterations of tuning; 0 for none.
        plan_out: file for the plan of the tuning, or None.
        watch_steps: one iteration in so many is watched; 0 for none.
        watch_log: whether the log has a line of what was watched.
        watch_out: folder for what is watched, or None.
        overlap_experts: whether the experts run in the pipeline, chunk by chunk.
        max_nodes_per_token, max_ranks_per_token: limits for a token's experts, or None.
    """

    chain: str = AUTO
    num_chunks: int | None = None
    ranks_per_node: int | None = None
    cluster: Cluster | None = None
    calibrate_seconds: float = 0.0
    plan: "Plan | None" = None
    memory_limit_gb: float | None = None
    beside_us: float = 0.0
    overlaps: tuple[str, ...] = ()
    rail_ctas: int | None = None
    node_ctas: int | None = None
    max_ctas: int | None = None
    kernels: str = AUTO
    wire_dtype: str | None = None
    wire_backward: bool = False
    combine_dtype: str | None = None
    check: int = 1
    record: str | None = None
    record_iteration: int = DEFAULT_RECORD_ITERATION
    tune_steps: int = 0
    plan_out: str | None = None
    watch_steps: int = 0
    watch_log: bool = False
    watch_out: str | None = None
    overlap_experts: bool = False
    max_nodes_per_token: int | None = None
    max_ranks_per_token: int | None = None

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
            name.removeprefix("moe_monta_"): getattr(source, name)
            for name in OPTION_NAMES
            if getattr(source, name, None) is not None
        }

        def check(name: str, holds: Callable[[Any], bool], rule: str) -> None:
            if name in given:
                value = given[name]
                require(holds(value), f"moe_monta_{name}", repr(value), rule)

        for name in ("chain", "cluster", "plan", "plan_out", "record", "watch_out"):
            folders = {"record": "a folder", "watch_out": "a folder"}
            what = {"chain": "a name", **folders}.get(name, "a file")
            check(name, lambda value: value and isinstance(value, _FILE_TYPES), f"be {what}")
        chain = given.get("chain", AUTO)
        check_chain(chain, "moe_monta_chain", also=(AUTO,))
        limits = ("max_nodes_per_token", "max_ranks_per_token")
        ctas = ("rail_ctas", "node_ctas", "max_ctas")
        for name in ("num_chunks", "ranks_per_node", *ctas, "record_iteration", *limits):
            check(name, lambda value: type(value) is int and value >= 1, "be an integer >= 1")
        check(
            "memory_limit_gb",
            lambda value: type(value) in (int, float) and 0 < value < math.inf,
            "be a number > 0",
        )
        check(
            "memory_limit_gb",
            lambda _: chain == AUTO and "plan" not in given,
            "be left out where a flag or a plan names the chain, which is used whatever it holds",
        )
        check("kernels", lambda value: value in (AUTO, "torch", "fused"), "be auto, torch or fused")
        check("wire_dtype", lambda value: value == "fp8", "be fp8, or left out")
        check("wire_backward", lambda value: type(value) is bool, "be a switch: 1 or 0")
        check("wire_backward", lambda _: "wire_dtype" in given, "come with moe_monta_wire_dtype")
        check("combine_dtype", lambda value: value == "fp32", "be fp32, or left out")
        check("check", lambda value: type(value) is int and value in (0, 1), "be 0 or 1")
        overlaps = given["overlaps"] = _overlaps(source)
        check(
            "beside_us",
            lambda value: type(value) in (int, float) and 0 <= value < math.inf,
            "be a number >= 0",
        )
        check(
            "beside_us",
            lambda value: value == 0 or (chain == AUTO and "plan" not in given),
            "be 0 or left out where a flag or a plan names the chain, which is used as it is",
        )
        check(
            "beside_us",
            lambda value: value == 0 or overlaps != (),
            f"be 0 or left out without {' or '.join(OVERLAPS)}, as nothing hides the exchange then",
        )
        check("record_iteration", lambda _: "record" in given, "come with moe_monta_record")
        needs_costs = _is_auto(given) and "cluster" not in given
        check(
            "calibrate_seconds",
            lambda value: type(value) in (int, float) and 0 <= value < math.inf,
            "be a number >= 0; 0 is off",
        )
        check(
            "calibrate_seconds",
            lambda value: value == 0 or needs_costs,
            "be 0 or left out beside a cluster file, or where a flag or a plan names the chain",
        )
        if needs_costs:
            given.setdefault("calibrate_seconds", _default_calibrate_s(source))
        tune_steps = given.setdefault(
            "tune_steps", _default_steps(source, given, DEFAULT_TUNE_STEPS)
        )
        given.setdefault("watch_steps", _default_steps(source, given, DEFAULT_WATCH_STEPS))
        for name in ("tune_steps", "watch_steps"):
            check(
                name,
                lambda value: type(value) is int and value >= 0,
                "be an integer >= 0; 0 is off",
            )
        check(
            "watch_steps",
            lambda value: value == 0 or not given.get("overlap_experts"),
            "be 0 or left out with moe_monta_overlap_experts, whose passes are not timed",
        )
        check("watch_log", lambda value: type(value) is bool, "be a switch: 1 or 0")
        check(
            "tune_steps",
            lambda value: value == 0 or (chain == AUTO and "plan" not in given),
            "be 0 or left out where a flag or a plan names the chain, which is used as it is",
        )
        check("plan_out", lambda _: tune_steps > 0, "be left out without tuning, which writes it")
        check("plan_out", _can_be_written, "be a file in a folder that exists")
        if "plan" in given:
            for name in ("chain", "num_chunks"):
                check(name, lambda _: False, "be left out beside moe_monta_plan, which holds it")
            from monta_megatron.planner.plan import Plan

            given["plan"] = _once(Plan.load, given["plan"])
        if chain != AUTO:
            given["num_chunks"] = chunks_of(
                CHAINS[chain], given.get("num_chunks"), "moe_monta_num_chunks"
            )
        named = given["plan"].chain if "plan" in given else chain
        check(
            "combine_dtype",
            lambda _: named == AUTO or CHAINS[named].rows == "tokens",
            f"be left out with {named}, which sums no copies of a token on the way",
        )
        check("overlap_experts", lambda value: type(value) is bool, "be a switch: 1 or 0")
        if given.get("overlap_experts") or getattr(given.get("plan"), "experts_pipelined", False):
            from monta_megatron.integration.experts import check_options

            check_options(given, chain)
        # Code may pass a `Cluster` itself instead of a file.
        if "cluster" in given and not isinstance(given["cluster"], Cluster):
            from monta_megatron.common import presets
            from monta_megatron.planner.cluster_file import load_cluster

            given["cluster"] = _once(load_cluster, presets.find("clusters", given["cluster"]))
        return cls(**given)


def defaults_from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Defaults of the option fields, from MOE_MONTA_CHAIN and the like; None where unset."""
    defaults: dict[str, Any] = {}
    for entry in fields(OptionFields):
        text = environ.get(entry.name.upper())
        defaults[entry.name] = entry.metadata["read"](text) if text else None
    return defaults


def _default_steps(source: object, given: Mapping[str, Any], steps: int) -> int:
    """Deterministic mode is to do the same in every run, which times never do."""
    is_off = getattr(source, "deterministic_mode", False) or given.get("overlap_experts")
    return steps if _is_auto(given) and not is_off else 0


def _default_calibrate_s(source: object) -> float:
    """Times differ between runs, and on CPU ranks, which share cores, between seconds."""
    import torch

    is_off = getattr(source, "deterministic_mode", False) or not torch.accelerator.is_available()
    return 0.0 if is_off else DEFAULT_CALIBRATE_S


def _is_auto(given: Mapping[str, Any]) -> bool:
    return given.get("chain", AUTO) == AUTO and "plan" not in given


def _overlaps(source: object) -> tuple[str, ...]:
    """Settings of `OVERLAPS` that are on."""
    settings = [name for name in OVERLAPS if getattr(source, name, False)]
    if getattr(source, "moe_shared_expert_intermediate_size", None) is None:
        settings = settings[: settings.count(OVERLAPS[0])]
    return tuple(settings)


def _can_be_written(path: str | os.PathLike[str]) -> bool:
    return Path(path).absolute().parent.is_dir() and not Path(path).is_dir()


def _once(read: Callable[[str | Path], T], path: str | Path) -> T:
    """Content of a file, read once per process unless it changes: every layer asks for it."""
    # `read` says what is wrong with a file that does not exist.
    changed = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
    return _as_of(read, path, changed)


@cache
def _as_of(read: Callable[[str | Path], T], path: str | Path, changed: int) -> T:
    return read(path)
