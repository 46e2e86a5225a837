"""The flags of `plan` and `timeline` that make a plan's request: model, cluster, layout, tokens."""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from monta_megatron.common.flags import num_tokens, whole

if TYPE_CHECKING:
    from monta_megatron.tools.plan.request import PlanRequest

FILES = {
    "model": "a file, a config.json of Hugging Face or its folder, or a preset by its name in "
    "configs/models",
    "cluster": "a file, or a preset by its name in configs/clusters",
}
# Flag -> how its value is read, and help.
FLAGS = {
    "world-size": (whole(1), "all ranks (default: those of the cluster)"),
    "nodes": (whole(1), "hosts, as --world-size in its other form"),
    "ranks-per-node": (whole(1), "that the job uses of a host, with --nodes"),
    "tp": (whole(1), "tensor parallel size, with sequence parallelism"),
    "ep": (whole(1), "expert parallel size"),
    "etp": (whole(1), "expert tensor parallel size"),
    "cp": (whole(1), "context parallel size"),
    "pp": (whole(1), "pipeline parallel size"),
    "tokens": (num_tokens(1), "of a rank (default: the model's batch)"),
    "seq-length": (num_tokens(1), "tokens of a sequence (default: the model's)"),
    "micro-batch-size": (whole(1), "sequences of a micro-batch (default: the model's)"),
    "global-batch-size": (whole(1), "sequences of an iteration, for what it gains"),
}


def add_arguments(parser: Any, flags: Iterable[str] = FLAGS) -> None:
    """Add the flags for the files, and some of `FLAGS`."""
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=text)
    for name in flags:
        read, text = FLAGS[name]
        parser.add_argument(f"--{name}", metavar="N", type=read, help=text)


def request_of(parsed: argparse.Namespace, **settings: Any) -> "PlanRequest":
    """The request that the flags make.

    Args:
        parsed: flags of `add_arguments`.
        settings: more fields of the request.

    Raises:
        ValueError: flags do not agree.
    """
    from monta_megatron.tools.plan.request import PlanRequest

    given = {
        name.replace("-", "_"): getattr(parsed, name.replace("-", "_"), None) for name in FLAGS
    }
    hosts, on_host = given.pop("nodes"), given["ranks_per_node"]
    if hosts is None and on_host is not None:
        raise ValueError(f"--ranks-per-node: got {on_host}, must be with --nodes")
    if hosts is not None:
        ranks = hosts * (on_host or _ranks_per_host(parsed.cluster))
        if given["world_size"] not in (None, ranks):
            raise ValueError(
                f"--world-size: got {given['world_size']}, must be {ranks}, the ranks of --nodes "
                f"{hosts}, or be left out"
            )
        given["world_size"] = ranks
    sizes = {name: value for name, value in given.items() if value is not None}
    # A log takes the model's place.
    return PlanRequest(model=parsed.model or "", cluster=parsed.cluster, **sizes, **settings)


def _ranks_per_host(cluster: str) -> int:
    from monta_megatron.planner.cluster_file import load_cluster

    loaded = load_cluster(cluster)
    return loaded.ranks_per_host or loaded.ranks_per_node
