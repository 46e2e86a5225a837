"""Megatron's arguments and configuration: our options, and readers of the dispatcher type.

Options are dataclass fields of TransformerConfig: Megatron generates its command line from the
fields, copies arguments into the configuration by field, and prints and checkpoints them. A mistake
on the command line is one clear line and exit status 2, before anything starts.

Megatron has no registry of dispatchers: it compares the string `moe_token_dispatcher_type`, in many
functions. A configuration keeps the string "monta"; functions that must see the stock dispatcher's
string are called with it, and "monta" is restored afterwards. `tests/unit/test_dispatcher_type.py`
lists every comparison and how it is handled.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NoReturn, get_args

from monta_megatron.common.errors import UserError
from monta_megatron.common.ranks import linger, report
from monta_megatron.common.text import shown
from monta_megatron.core import Layout
from monta_megatron.exchange.launch_order import set_launch_order
from monta_megatron.integration.options import (
    DISPATCHER_TYPE,
    OPTION_NAMES,
    OptionFields,
    Options,
    defaults_from_environment,
    etp_size_of,
)
from monta_megatron.integration.planning import check_chain_runs
from monta_megatron.integration.registration import PATCHES
from monta_megatron.integration.supported_settings import check_supported


def is_monta(config: object) -> bool:
    """Whether a TransformerConfig, or parsed arguments, ask for this dispatcher."""
    return getattr(config, "moe_token_dispatcher_type", None) == DISPATCHER_TYPE


@contextmanager
def seen_as_alltoall(config: Any) -> Iterator[None]:
    """Inside this context, readers of `config` see the stock dispatcher's name."""
    dispatcher_type = config.moe_token_dispatcher_type
    config.moe_token_dispatcher_type = "alltoall"
    try:
        yield
    finally:
        config.moe_token_dispatcher_type = dispatcher_type


def holds_up_others(config: Any) -> bool:
    """Whether NCCL's launch order would hold up collectives that overlap with our passes.

    The 1F1B overlap issues those of tensor and context parallelism of one micro-batch behind the
    passes of another.

    Args:
        config: a TransformerConfig, or parsed arguments.
    """
    tp_size = getattr(config, "tensor_model_parallel_size", None) or 1
    cp_size = getattr(config, "context_parallel_size", None) or 1
    overlaps_1f1b = getattr(config, "overlap_moe_expert_parallel_comm", False)
    return bool(overlaps_1f1b) and tp_size * cp_size > 1


# Megatron's modules in which we answer `should_free_input`: one of two, depending on the release.
_answered: list[str] = []


def patch_should_free_input(module: Any) -> None:
    """Answer `should_free_input` where this module of Megatron defines it."""
    function = vars(module).get("should_free_input")
    if function is not None and function.__module__ == module.__name__:
        module.should_free_input = answer_should_free_input(function)
        _answered.append(module.__name__)


def check_schedule(config: Any) -> None:
    """Check that Megatron's 1F1B overlap schedule, if it runs, asks us what it may free.

    Raises:
        UserError: it would free what the experts have saved.
    """
    if not getattr(config, "overlap_moe_expert_parallel_comm", False):
        return
    for name, patch in PATCHES:
        if patch == "arguments:patch_should_free_input":
            with suppress(ImportError):
                import_module(name)
    if is_monta(config) and _answered:
        return
    where, advice = "this megatron-core, as should_free_input is not found in it", "leave it out"
    if not is_monta(config):
        where = "the dispatcher in the layer spec"
        advice = "set moe_token_dispatcher_type to 'monta' instead"
    raise UserError(
        f"overlap_moe_expert_parallel_comm: got True, must be False with {where}, since Megatron's "
        f"schedule would free what the experts have saved; {advice}"
    )


def answer_should_free_input(original: Callable[..., bool]) -> Callable[..., bool]:
    """Megatron's rule for the 1F1B schedule, with our answer for the experts' input.

    The inputs of dispatch and combine may be freed as stock's are: our autograd functions save none
    of them, and nothing else uses the input of dispatch. The experts' input must stay. Stock's
    experts get a sorted copy of it, but ours get the tensor itself, which the grouped GEMM saves.
    Low precision does not change this: layers may stay in bf16, or their input may be offloaded.
    """

    @functools.wraps(original)
    def should_free_input(name: str, is_moe: bool, config: Any, *args: Any, **kwargs: Any) -> bool:
        if not is_monta(config):
            return original(name, is_moe, config, *args, **kwargs)
        with seen_as_alltoall(config):
            return name != "mlp" and original(name, is_moe, config, *args, **kwargs)

    return should_free_input


def extend_transformer_config(transformer_config: ModuleType) -> None:
    """Add the dispatcher type and the option fields to TransformerConfig and its subclasses.

    A subclass of ours would not do: Megatron and frameworks create these classes by name, and read
    their fields for the command line, copies and checkpoints. The classes are complete when we see
    them, and creating them again would leave references to the old ones. So the fields are entered
    where `dataclasses.fields` finds them, and each generated constructor is wrapped to take them.
    """
    base = transformer_config.TransformerConfig
    defaults = defaults_from_environment()
    for config_class in _with_subclasses(base):
        fields = config_class.__dataclass_fields__
        choices = get_args(fields["moe_token_dispatcher_type"].type)
        fields["moe_token_dispatcher_type"].type = Literal[(*choices, DISPATCHER_TYPE)]
        for entry in dataclasses.fields(OptionFields):
            entry.default = defaults[entry.name]
            fields[entry.name] = entry
        if "__init__" in vars(config_class):
            config_class.__init__ = _accepting_options(config_class.__init__)
    for name in OPTION_NAMES:
        setattr(base, name, defaults[name])
    base.__post_init__ = _checking_monta(base.__post_init__)


def check_config(config: Any) -> None:
    """Check a configuration that asks for "monta"; the first error is raised as a UserError.

    Args:
        config: a TransformerConfig, or parsed arguments.
    """
    check_supported(config)
    options = Options.of(config)
    ep_size = getattr(config, "expert_model_parallel_size", None) or 1
    etp_size = etp_size_of(config)
    # Rules that depend on the nodes are checked once they are known.
    one_node = (0,) * (ep_size * etp_size)
    check_chain_runs(
        options,
        config,
        Layout(ep=ep_size, etp=etp_size, num_local_experts=1, rank=0, nodes=one_node),
    )


def _with_subclasses(base: type) -> list[Any]:
    classes: list[Any] = [base]
    for config_class in classes:
        classes.extend(config_class.__subclasses__())
    return classes


def _accepting_options(original: Callable[..., None]) -> Callable[..., None]:
    """A generated dataclass constructor that also takes the option fields, by keyword."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in OPTION_NAMES:
            if name in kwargs:
                setattr(self, name, kwargs.pop(name))
        original(self, *args, **kwargs)

    return __init__


def _checking_monta(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Our checks, then Megatron's, which see "alltoall"."""

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        if not is_monta(self):
            original(self)
            return
        check_config(self)
        set_launch_order(holds_up_others(self))
        with seen_as_alltoall(self):
            original(self)

    return __post_init__


# Not empty once Megatron has validated a command line in this process.
_command_line_seen: list[bool] = []


def patch_arguments(arguments: Any) -> None:
    """Check our options before `megatron.training.arguments` validates its own."""
    original = arguments.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *more: Any, **kwargs: Any) -> Any:
        _command_line_seen.append(True)
        try:
            check_arguments(args)
        except UserError as error:
            report(f"monta: error: {error}")
            raise SystemExit(2) from None
        if is_monta(args):
            # Megatron makes its process groups later.
            set_launch_order(holds_up_others(args))
        return original(args, *more, **kwargs)

    arguments.validate_args = validate_args


def check_arguments(args: Any) -> None:
    """Check parsed arguments; the first error is raised as a UserError."""
    if not is_monta(args):
        for name, default in defaults_from_environment().items():
            if getattr(args, name, None) not in (None, default):
                raise UserError(
                    f"{name}: given, but moe_token_dispatcher_type is "
                    f"{args.moe_token_dispatcher_type!r}; add --moe-token-dispatcher-type monta or "
                    f"leave --{name.replace('_', '-')} out"
                )
        return
    if args.num_experts is None:
        raise UserError(
            "moe_token_dispatcher_type: got 'monta', needs a Mixture-of-Experts model; set "
            "--num-experts or leave --moe-token-dispatcher-type out"
        )
    check_config(args)


def refuse(error: UserError, reports: bool) -> NoReturn:
    """End a training whose command line was checked here with one line and exit status 2.

    Args:
        error: raised on all ranks of the pipeline stage.
        reports: whether this rank prints the line.

    Raises:
        UserError: the error itself, outside of such a training, so that callers may handle it.
    """
    if not _command_line_seen:
        raise error
    if reports:
        print(shown(f"monta: error: {error}"), file=sys.stderr, flush=True)
    else:
        linger()
    raise SystemExit(2) from None
