"""The user's options in one table: names, help texts, environment variables, rules.

Each option is a field of Megatron's TransformerConfig, hence a Megatron argument
(`--moe-monta-chain`), hence in Megatron's printed arguments and in its checkpoints. The
environment variable of the same name (MOE_MONTA_CHAIN) gives the default of that argument.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

from monta_megatron.chains import CHAINS, DEFAULT_NUM_CHUNKS, Chain, check_chain, chunks_of
from monta_megatron.common import files
from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import require
from monta_megatron.planner.cluster import Cluster

DISPATCHER_TYPE = "monta"
AUTO = "auto"
DEFAULT_TUNE_STEPS = 24
# Two candidates with three trials each.
LEAST_TUNE_STEPS = 6


class Values(NamedTuple):
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
        """Value of a text; a text without a value is kept, and `Options.of` refuses it."""
        if self.type is bool:
            return {"1": True, "0": None}.get(text, text)
        try:
            return self.type(text)
        except ValueError:
            return text


def etp_size_of(config: Any) -> int:
    """The expert tensor parallel size of a configuration or arguments, by Megatron's default."""
    names = ("expert_tensor_parallel_size", "tensor_model_parallel_size")
    return next((size for name in names if (size := getattr(config, name, None))), 1)


def _is_path(value: Any) -> bool:
    # Code may pass a `Cluster`.
    return bool(value) and isinstance(value, str | os.PathLike | Cluster)


NAME = Values(str, _is_path, "be a name")
FILE = Values(str, _is_path, "be a file")
KERNELS = Values(str, lambda value: value in (AUTO, "torch", "fused"), "be auto, torch or fused")
COUNT = Values(int, lambda value: type(value) is int and value >= 1, "be an integer >= 1")
STEPS = Values(
    int,
    lambda value: type(value) is int and (value == 0 or value >= LEAST_TUNE_STEPS),
    f"be 0, which is off, or an integer >= {LEAST_TUNE_STEPS}",
)
ZERO_OR_ONE = Values(int, lambda value: type(value) is int and value in (0, 1), "be 0 or 1")
SWITCH = Values(bool, lambda value: type(value) is bool, "be a switch: 1 or 0")


def _option(kind: Values, help_text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help_text})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one dispatcher, resolved and checked; the help texts explain them."""

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
    tune_steps: int = _option(
        STEPS,
        "Optimizer steps in which auto tries its candidates in a round robin, one in a step, and "
        "whole iterations are timed; the fastest stays (default: "
        f"{DEFAULT_TUNE_STEPS}, which are 8 candidates with 3 trials each; 0, which is off, in "
        "deterministic mode). 1,000 steps later they are tried once more.",
        0,
    )
    kernels: str = _option(
        KERNELS,
        "What copies and sums rows, to the same bits: torch (PyTorch's operations), fused (Triton "
        "kernels) or auto (fused on GPUs where every rank can build a Triton kernel, else torch; "
        "default).",
        AUTO,
    )
    check: int = _option(
        ZERO_OR_ONE,
        "1: before a chain first carries rows, it makes a round trip with known answer, forward "
        "and backward; a difference ends the run (default). 0: no round trip.",
        1,
    )
    overlap_experts: bool = _option(
        SWITCH,
        "Run dispatch, experts and combine of an MoE layer as one pipeline: while a chunk is "
        "computed, the next one is dispatched and the last one combined. auto tries the best "
        "chain of tokens in 2 and in 4 chunks; a named chain has to be one of tokens "
        "(environment: 1).",
        False,
    )

    @property
    def named_chain(self) -> Chain | None:
        """The chain that a flag names; None where the planner chooses."""
        return None if self.chain == AUTO else CHAINS[self.chain]

    @classmethod
    def of(cls, source: object) -> "Options":
        """The options in `source`, a TransformerConfig or parsed arguments.

        Raises:
            UserError: one is out of range; the message names option, value and rule.
        """
        # Without our fields, as with a layer spec alone, the variables hold too.
        defaults = defaults_from_environment()
        given = {
            name.removeprefix("moe_monta_"): value
            for name, default in defaults.items()
            if (value := getattr(source, name, default)) is not None
        }

        def check(name: str, holds: bool, rule: str) -> None:
            require(holds, f"moe_monta_{name}", repr(given[name]), rule)

        for name, value in given.items():
            check(name, KINDS[name].holds(value), KINDS[name].rule)
        chain = given.get("chain", AUTO)
        check_chain(chain, "moe_monta_chain", also=(AUTO,))
        is_auto = chain == AUTO
        # Measured times differ between runs, which have to be alike in deterministic mode.
        is_off = getattr(source, "deterministic_mode", False)
        tuned = DEFAULT_TUNE_STEPS if is_auto and not is_off else 0
        tune_steps = given.setdefault("tune_steps", tuned)
        check("tune_steps", tune_steps == 0 or not is_off, "be 0 or left out in deterministic mode")
        named = "be 0 or left out where a chain is named, which is used as it is"
        check("tune_steps", tune_steps == 0 or is_auto, named)
        if not is_auto:
            given["num_chunks"] = chunks_of(
                CHAINS[chain], given.get("num_chunks"), "moe_monta_num_chunks"
            )
        of_tokens = [name for name, each in CHAINS.items() if each.rows == "tokens"]
        if given.get("overlap_experts") and not is_auto and chain not in of_tokens:
            raise UserError(
                f"moe_monta_overlap_experts: given with {chain}, must be with one of "
                f"{', '.join(of_tokens)}; rows of the other chains are permuted by expert before "
                "they are split into chunks"
            )
        # Code may pass a `Cluster` itself instead of a file.
        if "cluster" in given and not isinstance(given["cluster"], Cluster):
            path = files.find_config("clusters", given["cluster"])
            # `load_cluster` reports a file that does not exist.
            changed_ns = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
            given["cluster"] = _cluster(path, changed_ns)
        return cls(**given)


# Kinds of values by option, without the prefix moe_monta_.
KINDS: dict[str, Values] = {entry.name: entry.metadata["kind"] for entry in fields(Options)}
OPTION_NAMES = tuple(f"moe_monta_{name}" for name in KINDS)


def _argument(name: str, kind: Values, help_text: str) -> Any:
    """A field of TransformerConfig, from which Megatron makes an argument; None if not given."""
    # Megatron reads help texts from its class's source, which does not contain these fields.
    meta: dict[str, Any] = {"help": help_text, "type": kind.read}
    if kind is SWITCH:
        # Megatron would make `--no-...` from a field whose default is not False.
        flag = f"--{name.replace('_', '-')}"
        meta = {"help": help_text, "action": "store_true", "arg_names": [flag]}
    # `Optional`, because Megatron's argument factory does not understand `| None`.
    return name, Optional[kind.type], field(default=None, metadata={"argparse_meta": meta})  # noqa: UP045


# The fields that are added to TransformerConfig.
OptionFields = make_dataclass(
    "OptionFields",
    [
        _argument(f"moe_monta_{entry.name}", entry.metadata["kind"], entry.metadata["help"])
        for entry in fields(Options)
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


@cache
def _cluster(path: str | Path, changed_ns: int) -> Cluster:
    """A cluster file, read once per process unless it changes: every layer asks for it."""
    # A training without a cluster file needs no reader of YAML.
    from monta_megatron.planner.cluster_file import load_cluster

    return load_cluster(path)
