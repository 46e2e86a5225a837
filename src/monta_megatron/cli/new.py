"""`monta new`: a commented model, cluster or run file to begin with."""

import argparse
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.field_texts import meanings
from monta_megatron.common.flags import DTYPE_BYTES, positive, printable, whole
from monta_megatron.common.rules import require
from monta_megatron.common.tables import print_json, tell
from monta_megatron.planner.models.model import Model

if TYPE_CHECKING:
    from monta_megatron.tools.new.template import Template

EXAMPLE = """\
examples:
  monta new model --from config.json --out model.yaml
  monta new cluster --num-nodes 16 --out cluster.yaml
  monta new run --model mixtral_8x7b --cluster h100_8x_ndr --nodes 2
"""
MODEL_EXAMPLE = """\
examples:
  monta new model --from config.json --seq-length 8192 --out model.yaml
  monta new model --name mine --hidden-size 2048 --num-layers 24 \\
      --num-attention-heads 16 --num-experts 64 --moe-router-topk 6 \\
      --moe-ffn-hidden-size 1408 --num-parameters-billions 14.3
"""
CLUSTER_EXAMPLE = """\
examples:
  monta new cluster --num-nodes 16 --out cluster.yaml
  monta new cluster --gpu H100 --num-nodes 16 --ranks-per-node 8 \\
      --nics-per-node 8 --network-rate "400 Gb/s"
"""
RUN_EXAMPLE = """\
examples:
  monta new run --model mixtral_8x7b --cluster h100_8x_ndr --nodes 2 \\
      --pp 2 --out run.yaml
  monta new run --model model.yaml --cluster cluster.yaml --nodes 16 \\
      --tp 2 --ep 16 --pp 4
"""

# Fields of `Model` that no flag sets.
WITHOUT_FLAG = ("assumed", "megatron", "not_expressed", "taken")
CLUSTER_SIZES: dict[str, tuple[Callable[[str], Any], str]] = {
    "num-nodes": (whole(1), "nodes (default: those of the Slurm job)"),
    "ranks-per-node": (whole(1), "GPUs that a node link joins (default: those found)"),
    "nics-per-node": (whole(1), "network interfaces (default: the fastest ones found)"),
    "memory-gb-per-rank": (positive, "of a GPU, in 1e9 bytes (default: what is found)"),
}
# Flag -> the resource whose rate it is, and the flag's meaning.
CLUSTER_RATES = {
    "network-rate": ("inter", 'line rate of an interface, such as "400 Gb/s" or 400G'),
    "network-rate-reached": ("inter", "rate of an interface that large messages reach, instead"),
    "node-link-rate": ("intra", 'rate that large messages reach, such as "335 GB/s"'),
    "memory-rate": ("memory", "rate that large copies reach, reads and writes together"),
}
GPU_NAMES = (
    *("A100", "A30", "A800", "B200", "B300", "GB200"),
    *("H100", "H20", "H200", "H800", "L40S"),
)


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "new",
        help="write a commented model, cluster or run file",
        description="Write a file to begin with, every field with its meaning. Unknown values "
        "are left to be filled in, and the loader names them.",
        epilog=EXAMPLE,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    _add_model(kinds)
    _add_cluster(kinds)
    _add_run(kinds)


def _add_model(kinds: Any) -> None:
    parser = kinds.add_parser(
        "model",
        help="from sizes, or from a config.json of Hugging Face",
        description="Write a model file from sizes, or from a config.json of Hugging Face.",
        epilog=MODEL_EXAMPLE,
    )
    parser.add_argument("--from", dest="start", metavar="FILE", help=planning.FILES["model"])
    texts = meanings(Model)
    for name, kind in get_type_hints(Model).items():
        if name in WITHOUT_FLAG:
            continue
        reader = _reader(kind)
        settings: dict[str, Any] = {"type": reader, "metavar": "N"}
        if reader is printable:
            settings["metavar"] = "TEXT"
        elif reader is None:
            settings = {"choices": tuple(DTYPE_BYTES), "metavar": "DTYPE"}
        parser.add_argument(f"--{name.replace('_', '-')}", help=texts.get(name), **settings)
    _add_output(parser, _model)


def _add_cluster(kinds: Any) -> None:
    parser = kinds.add_parser(
        "cluster",
        help="from what this machine has",
        description="Write a cluster file from the GPUs and network interfaces of this machine, "
        "from what is given, and from published figures of the GPUs.",
        epilog=CLUSTER_EXAMPLE,
    )
    parser.add_argument("--name", metavar="TEXT", type=printable, help="what users call it")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        choices=GPU_NAMES,
        help=f"take its figures, one of {', '.join(GPU_NAMES)} (default: the GPU found)",
    )
    for name, (reader, text) in CLUSTER_SIZES.items():
        # A cluster's nodes go by the name of a job's, too.
        also = ("--nodes",) if name == "num-nodes" else ()
        parser.add_argument(f"--{name}", *also, metavar="N", type=reader, help=text)
    for name, (resource, meaning) in CLUSTER_RATES.items():
        parser.add_argument(
            f"--{name}", metavar="RATE", type=functools.partial(_rate, resource), help=meaning
        )
    _add_output(parser, _cluster)


def _add_run(kinds: Any) -> None:
    parser = kinds.add_parser(
        "run",
        help="from a model, a cluster and a layout",
        description="Write a run file for monta launch. Without --tp, --ep and --etp: with the "
        "layout whose exchange costs least of all that fit. The file lists the keys of sbatch that "
        "clusters ask for, and has NCCL's environment for the network of this machine: write it "
        "on a node of the job.",
        epilog=RUN_EXAMPLE,
    )
    for name, text in planning.FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", required=True, help=text)
    planning.add_sizes(parser, {**planning.JOB, **planning.SIZES, **planning.BATCH})
    parser.add_argument("--name", metavar="NAME", type=printable, help="default: the model's")
    parser.add_argument("--ignore-memory", action="store_true", help=planning.IGNORE_MEMORY)
    _add_output(parser, _run)


def _add_output(parser: Any, make: Callable[[argparse.Namespace], "Template"]) -> None:
    parser.add_argument("--out", metavar="FILE", help="write it there (default: print it)")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    add_json(parser)
    parser.set_defaults(run=run, make=make)


def run(parsed: argparse.Namespace) -> int:
    """Write or print the file; fields to fill in go to standard error."""
    from monta_megatron.common.files import write_whole

    if parsed.out is not None and not parsed.force and Path(parsed.out).exists():
        raise ValueError(f"--out: got {parsed.out}, must not exist; --force overwrites it")
    template: Template = parsed.make(parsed)
    if parsed.out is not None:
        write_whole(Path(parsed.out), template.text)
        tell("new", f"wrote {parsed.out}")
    for warning in template.warnings:
        tell("new", warning)
    if template.to_fill_in:
        tell("new", f"to fill in: {', '.join(template.to_fill_in)}")
    if parsed.json:
        print_json({"kind": parsed.kind, "file": parsed.out, **template.document()})
    elif parsed.out is None:
        print(template.text, end="")
    return 0


def _model(parsed: argparse.Namespace) -> "Template":
    from monta_megatron.tools.new.run import model_template

    names = [name for name in get_type_hints(Model) if name not in WITHOUT_FLAG]
    return model_template(_given(parsed, names), parsed.start)


def _cluster(parsed: argparse.Namespace) -> "Template":
    from monta_megatron.common.units import Rate
    from monta_megatron.tools.new.cluster import cluster_template, find_machine

    rates: dict[Any, Rate] = {
        resource: Rate.from_text(text)
        for name, (resource, _) in CLUSTER_RATES.items()
        if (text := getattr(parsed, name.replace("-", "_"))) is not None
    }
    names = ["name", *(name.replace("-", "_") for name in CLUSTER_SIZES)]
    is_line_rate = parsed.network_rate is not None
    is_once = not is_line_rate or parsed.network_rate_reached is None
    require(
        is_once, "--network-rate", parsed.network_rate, "be left out with --network-rate-reached"
    )
    return cluster_template(find_machine(), _given(parsed, names), rates, parsed.gpu, is_line_rate)


def _run(parsed: argparse.Namespace) -> "Template":
    from monta_megatron.tools.new.hardware import find_network
    from monta_megatron.tools.new.run import run_template
    from monta_megatron.tools.plan.request import PlanRequest

    names = [name.replace("-", "_") for name in (*planning.SIZES, *planning.BATCH)]
    nodes, ranks_per_node = _hosts(parsed)
    return run_template(
        PlanRequest(**_given(parsed, ["model", "cluster", "ignore_memory", *names])),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        name=parsed.name,
        folder=Path(parsed.out or "run.yaml").parent,
        network=find_network() if nodes > 1 else None,
    )


def _hosts(parsed: argparse.Namespace) -> tuple[int, int]:
    """The hosts of a run, and the ranks of each: the cluster's, or all where there are fewer.

    Raises:
        ValueError: neither --nodes nor --world-size is given, or the ranks fill no whole hosts.
    """
    from monta_megatron.planner.cluster_file import load_cluster

    of_cluster = load_cluster(parsed.cluster).ranks_per_node
    ranks_per_node = parsed.ranks_per_node or of_cluster
    if parsed.nodes is not None or parsed.ranks_per_node is None:
        world_size = planning.world_size_of(parsed, lambda: of_cluster)
    else:
        world_size = parsed.world_size
    if world_size is None:
        raise ValueError("--nodes: not given, must be, or --world-size for all ranks")
    ranks_per_node = min(ranks_per_node, world_size)
    if world_size % ranks_per_node:
        raise ValueError(
            f"--world-size: got {world_size}, must be a multiple of the {ranks_per_node} ranks of "
            "a node; --ranks-per-node says how many of them are used"
        )
    return world_size // ranks_per_node, ranks_per_node


def _given(parsed: argparse.Namespace, names: Any) -> Mapping[str, Any]:
    """Values of these flags that were given."""
    values = {name: getattr(parsed, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _reader(kind: Any) -> Callable[[str], Any] | None:
    """Parser of a text as a type; None for one of a few names."""
    readers: dict[Any, Callable[[str], Any]] = {int: whole(1), float: positive, str: printable}
    return readers.get(kind, whole(1) if kind == int | None else None)


def _rate(resource: str, text: str) -> str:
    """An argparse type: a rate with its unit, which a network may leave out."""
    from monta_megatron.common.units import Rate

    try:
        rate = Rate.from_text(text)
        has_unit = resource == "inter" or not rate.is_of_network
        require(has_unit, "rate", repr(text), f"be {Rate.RULE}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("rate: ")) from error
    return text
