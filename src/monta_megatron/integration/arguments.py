"""The command line: an error is one clear line and exit status 2, before anything starts."""

import functools
from collections.abc import Callable
from typing import Any

from monta_megatron.integration.config import check_config
from monta_megatron.integration.dispatcher_type import is_monta
from monta_megatron.options import OPTION_NAMES, defaults_from_environment
from monta_megatron.ranks.this_rank import report


def patch_arguments(arguments: Any) -> None:
    """Check our options before Megatron validates its own.

    Args:
        arguments: the module megatron.training.arguments.
    """
    arguments.validate_args = _checking_options(arguments.validate_args)


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


def _checking_options(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Any, *more: Any, **kwargs: Any) -> Any:
        try:
            check_arguments(args)
        except ValueError as error:
            report(f"monta: error: {error}")
            raise SystemExit(2) from None
        return original(args, *more, **kwargs)

    return validate_args
