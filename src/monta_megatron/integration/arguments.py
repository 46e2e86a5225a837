"""The command line: an error is one clear line and exit status 2, before anything starts."""

import functools
import math
import sys
from typing import Any, NoReturn

from monta_megatron.common.first_rank import linger, report
from monta_megatron.common.text import shown
from monta_megatron.integration.config import check_config
from monta_megatron.integration.dispatcher_type import is_monta
from monta_megatron.integration.options import (
    AUTO,
    OPTION_NAMES,
    Options,
    defaults_from_environment,
)

# Not empty once Megatron has validated a command line in this process.
_checked: list[bool] = []


def patch_arguments(arguments: Any) -> None:
    """Check our options before Megatron validates its own.

    Args:
        arguments: the module megatron.training.arguments.
    """
    original = arguments.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *more: Any, **kwargs: Any) -> Any:
        _checked.append(True)
        try:
            check_arguments(args)
        except ValueError as error:
            report(f"monta: error: {error}")
            raise SystemExit(2) from None
        return original(args, *more, **kwargs)

    arguments.validate_args = validate_args


def check_arguments(args: Any) -> None:
    """Check parsed arguments; the first thing that is wrong is raised as a ValueError."""
    defaults = defaults_from_environment()
    given = [
        name
        for name in OPTION_NAMES
        if getattr(args, name, None) is not None and getattr(args, name) != defaults[name]
    ]
    if given and not is_monta(args):
        raise ValueError(
            f"{given[0]}: given, but moe_token_dispatcher_type is "
            f"{args.moe_token_dispatcher_type!r}; add --moe-token-dispatcher-type monta or leave "
            f"--{given[0].replace('_', '-')} out"
        )
    if not is_monta(args):
        return
    if args.num_experts is None:
        raise ValueError(
            "moe_token_dispatcher_type: got 'monta', needs a Mixture-of-Experts model; set "
            "--num-experts or leave --moe-token-dispatcher-type out"
        )
    check_config(args)
    _check_plan(args)


def _check_plan(args: Any) -> None:
    """A plan file, against all that the command line says of its exchange; not of its nodes."""
    options = Options.of(args)
    plan, kernels = options.plan, options.kernels
    if plan is None:
        return
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    batch = (args.seq_length, args.micro_batch_size)
    here = {
        "ep": args.expert_model_parallel_size,
        "etp": args.expert_tensor_parallel_size or tp,
        "num_experts": args.num_experts,
        "topk": args.moe_router_topk,
        "hidden_size": getattr(args, "moe_latent_size", None) or args.hidden_size,
        "value_bytes": 2 if args.bf16 or args.fp16 else 4,
        "tokens_per_rank": None if None in batch else math.prod(batch) // (tp * cp),
        # What "auto" is depends on the ranks.
        "kernels": None if kernels == AUTO else kernels,
    }
    # Megatron itself refuses what is missing.
    incompatibility = plan.incompatibility(
        {name: value for name, value in here.items() if value is not None}
    )
    if incompatibility is not None:
        raise ValueError(f"moe_monta_plan: {incompatibility}")


def refuse(error: ValueError, reports: bool) -> NoReturn:
    """End a training, whose command line was checked here, with one line and exit status 2.

    Args:
        error: which the other ranks of the pipeline stage have too.
        reports: whether this rank says so.

    Raises:
        ValueError: the error itself, where code that is no such training may handle it.
    """
    if not _checked:
        raise error
    if reports:
        print(shown(f"monta: error: {error}"), file=sys.stderr, flush=True)
    else:
        linger()
    raise SystemExit(2) from None
