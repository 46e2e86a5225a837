"""What the settings of a training do to its exchange. A training and its plans both ask here.

Settings have the names of TransformerConfig. They are a configuration, parsed arguments, or
`settings_of` the arguments that a file or a log holds; one that is missing is off.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.program import Phase

# Megatron's dispatchers that have a price.
STOCK_DISPATCHERS = ("alltoall", "allgather")
# With any of these, Megatron refuses its `allgather`.
REFUSES_ALLGATHER = (
    "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm",
    "moe_router_padding_for_quantization",
    "moe_router_padding_for_fp8",
    "variable_seq_lengths",
)
# Setting -> the work that then hides a part of the exchange.
HIDES_EXCHANGE = {
    "overlap_moe_expert_parallel_comm": "the other micro-batch",
    "moe_shared_expert_overlap": "the shared experts",
}
# Virtual stages of a pipeline rank: Megatron derives the first from the argument, or from a size.
VIRTUAL_STAGES = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
# Scopes of a CUDA graph had several names; a deprecated one, if set, wins over its successor.
GRAPH_MODULES = ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules")


def settings_of(arguments: Mapping[str, Any]) -> SimpleNamespace:
    """Settings from Megatron's arguments by their names with dashes; values may be texts."""
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        text = str(value)
        if text in ("None", "null", "False", "false", ""):
            continue
        if text in ("True", "true"):
            value = True
        elif text.isdecimal():
            value = int(text)
        values[name.replace("-", "_")] = value
    return SimpleNamespace(**values)


def _is_on(settings: Any, name: str) -> bool:
    return bool(getattr(settings, name, None))


def _names(value: Any) -> set[str]:
    """Names in a list of texts or enums, or in the text of one, such as "['moe', 'mlp']"."""
    if isinstance(value, list | tuple | set):
        value = " ".join(getattr(entry, "name", None) or str(entry) for entry in value)
    # An enum's text is <CudaGraphModule.moe: 3>.
    return set(re.findall(r"\b[a-z]\w*", str(value or "")))


def recomputes_exchange(settings: Any) -> str | None:
    """The setting that runs dispatch and combine again in the backward pass of a layer, or None.

    Where the first layers of a stage alone are recomputed, the others count.
    """
    granularity = getattr(settings, "recompute_granularity", None)
    if granularity == "full" and not recomputed_layers(settings):
        return "recompute_granularity full"
    is_selective = granularity == "selective" or _is_on(settings, "moe_layer_recompute")
    modules = _names(getattr(settings, "recompute_modules", None))
    if is_selective and ("moe" in modules or _is_on(settings, "moe_layer_recompute")):
        return "recompute_modules moe"
    return None


def phase_of(settings: Any) -> Phase:
    """The passes of an exchange."""
    return "forward_backward" if recomputes_exchange(settings) is None else "recomputed"


def recomputed_layers(settings: Any) -> int | None:
    """Number of layers at the start of a virtual stage that are recomputed; None for all."""
    if getattr(settings, "recompute_method", None) != "block":
        return None
    num_stages = getattr(settings, "pipeline_model_parallel_size", None) or 1
    num_stages *= next(filter(None, (getattr(settings, name, None) for name in VIRTUAL_STAGES)), 1)
    layers = getattr(settings, "num_layers_per_virtual_pipeline_stage", None)
    layers = layers or math.ceil(getattr(settings, "num_layers", 1) / num_stages)
    number = getattr(settings, "recompute_num_layers", None) or layers
    return number if number < layers else None


def _graph_modules(settings: Any) -> set[str] | None:
    """Modules that CUDA graphs capture, none of them meaning all; None without graphs."""
    if (getattr(settings, "cuda_graph_impl", None) or "none") == "none":
        return None
    given = next(filter(None, (getattr(settings, name, None) for name in GRAPH_MODULES)), None)
    return _names(given) - {"full"}


def captures_whole_exchange(settings: Any) -> bool:
    """Whether CUDA graphs capture all phases of an MoE layer."""
    modules = _graph_modules(settings)
    if modules is None:
        return False
    # 0.16 lists the whole iteration as one of the modules.
    is_whole = settings.cuda_graph_impl == "full_iteration"
    return is_whole or not modules or bool(modules & {"full_iteration", "moe"})


def captures_preprocessing(settings: Any) -> bool:
    """Whether CUDA graphs capture the permutation of the rows before the exchange."""
    return captures_whole_exchange(settings) or "moe_preprocess" in (
        _graph_modules(settings) or set()
    )


def chain_problem(chain: Chain, settings: Any, demands_order: bool | None = None) -> str | None:
    """Why a chain cannot run with these settings, or None.

    Args:
        chain: the chain.
        settings: settings of the training.
        demands_order: whether Megatron adds a token's rows in the order of its batch-invariant
            mode; None where its version is not known, and the mode decides.
    """
    if chain.rows != "tokens":
        return None
    if _is_on(settings, "moe_pad_expert_input_to_capacity"):
        return (
            "its rows are tokens, and moe_pad_expert_input_to_capacity pads permuted tokens; take "
            "auto, alltoall or alltoall_allgather, or leave the padding out"
        )
    if demands_order is None:
        demands_order = _is_on(settings, "batch_invariant_mode")
    # Megatron's unpermute adds by EP rank, then by expert, in fp32, and rounds once.
    if demands_order:
        return (
            "batch_invariant_mode wants the rows of a token added by EP rank, then by expert, and "
            "rounded once; alltoall and alltoall_allgather do so"
        )
    return None


def auto_problem(chain: Chain, captures: bool) -> str | None:
    """Why "auto" does not choose a chain that can run, or None.

    Args:
        chain: the chain.
        captures: whether CUDA graphs capture the preprocessing.
    """
    if captures and chain.rows == "tokens":
        return (
            "its rows are tokens, and CUDA graphs of moe_preprocess capture the permutation "
            "before there is a choice"
        )
    return None


class Unsupported(NamedTuple):
    """A setting that is not supported.

    Attributes:
        setting: a field of TransformerConfig.
        reason: the reason why not, and the remedy.
        condition: predicate that holds for a configuration that asks for it; None where the field
            itself says so.
    """

    setting: str
    reason: str
    condition: Callable[[Any], bool] | None = None

    def holds(self, settings: Any) -> bool:
        """Whether a training with these settings asks for it."""
        if self.condition is not None:
            return self.condition(settings)
        return _is_on(settings, self.setting)


# Refused with this dispatcher in every training.
UNSUPPORTED = (
    Unsupported(
        "cuda_graph_impl",
        "it would capture the exchange of a whole MoE layer, which has not been tested on a GPU; "
        "name the modules to capture in cuda_graph_modules and leave 'moe' out",
        captures_whole_exchange,
    ),
    Unsupported(
        "overlap_dispatch_backward_with_experts_wgrad",
        "needs Transformer Engine's delayed weight gradients, untested with this dispatcher",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training does to the exchange of an MoE layer.

    Attributes:
        phase: the passes of an exchange.
        refused_chains: chain -> the reason why it cannot run, or why "auto" does not choose it.
        runs_allgather: whether the training can run Megatron's `allgather`.
        refuses_monta: the setting with which it refuses our dispatcher; None if that runs.
        dispatcher: the dispatcher that the settings name; None where they name none.
        hidden_behind: the work that hides a part of the exchange; None if nothing does.
        notes: remarks that a plan prints about the training.
    """

    phase: Phase = "forward_backward"
    refused_chains: Mapping[str, str] = field(default_factory=dict)
    runs_allgather: bool = True
    refuses_monta: str | None = None
    dispatcher: str | None = None
    hidden_behind: str | None = None
    notes: tuple[str, ...] = ()


def training_of(settings: Any, auto: bool = True) -> Training:
    """What a training with these settings does to its exchange.

    Args:
        settings: settings of the training.
        auto: whether "auto" chooses the chain; a chain that is named may run where "auto" does not
            choose it.
    """
    captures = auto and captures_preprocessing(settings)
    problems = {
        name: chain_problem(chain, settings) or auto_problem(chain, captures)
        for name, chain in CHAINS.items()
    }
    refused = [unsupported for unsupported in UNSUPPORTED if unsupported.holds(settings)]
    hiding = [name for name in HIDES_EXCHANGE if _is_on(settings, name)]

    notes = [f"monta refuses {entry.setting}: {entry.reason}" for entry in refused]
    recomputes, partly = recomputes_exchange(settings), recomputed_layers(settings)
    if recomputes is not None:
        notes.append(
            f"{recomputes}: dispatch and combine run again before the backward pass of a layer, "
            "which makes six passes of four; all six are priced"
        )
    elif getattr(settings, "recompute_granularity", None) == "full" and partly is not None:
        layers = "layer of a stage runs" if partly == 1 else f"{partly} layers of a stage run"
        notes.append(
            f"recompute_method block: the first {layers} dispatch and combine again, which is not "
            "priced"
        )
    notes += (
        f"{name} hides a part of the exchange behind {HIDES_EXCHANGE[name]} already: less is left "
        "to gain than times of the exchange say"
        for name in hiding
    )
    return Training(
        phase=phase_of(settings),
        refused_chains={name: problem for name, problem in problems.items() if problem},
        runs_allgather=not any(_is_on(settings, name) for name in REFUSES_ALLGATHER),
        refuses_monta=refused[0].setting if refused else None,
        dispatcher=getattr(settings, "moe_token_dispatcher_type", None),
        hidden_behind=HIDES_EXCHANGE[hiding[0]] if hiding else None,
        notes=tuple(notes),
    )
