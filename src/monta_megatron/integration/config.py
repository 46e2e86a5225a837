"""Our options as fields of Megatron's TransformerConfig, and the checks of a "monta" one.

Adding dataclass fields is enough: Megatron generates its command line from the fields,
copies arguments into the configuration by field, and prints and checkpoints what it parsed.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

from monta_megatron.chains.layout import Layout
from monta_megatron.integration.chain_policy import check_chain_runs
from monta_megatron.integration.dispatcher_type import is_monta, seen_as_alltoall
from monta_megatron.integration.options import (
    DISPATCHER_TYPE,
    OPTION_NAMES,
    OptionFields,
    Options,
    defaults_from_environment,
)
from monta_megatron.integration.supported_settings import check_supported
from monta_megatron.integration.versions import check_megatron_version


def extend_transformer_config(transformer_config: ModuleType) -> None:
    """Add the dispatcher type and the option fields to the class and its subclasses.

    Args:
        transformer_config: the module megatron.core.transformer.transformer_config.
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
    """Check a configuration that asks for "monta"; the first error is raised as a ValueError.

    Args:
        config: a TransformerConfig, or parsed arguments.
    """
    check_megatron_version()
    options = Options.of(config)
    check_supported(config)
    num_experts = getattr(config, "num_moe_experts", None) or getattr(config, "num_experts", None)
    ep_size = getattr(config, "expert_model_parallel_size", None) or 1
    if num_experts is not None and num_experts % ep_size != 0:
        raise ValueError(
            f"num_experts: got {num_experts}, must be a multiple of "
            f"expert_model_parallel_size ({ep_size})"
        )
    # Megatron's default.
    etp_size = getattr(config, "expert_tensor_parallel_size", None) or (
        getattr(config, "tensor_model_parallel_size", None) or 1
    )
    # What depends on the nodes is checked once they are known.
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
        with seen_as_alltoall(self):
            original(self)

    return __post_init__
