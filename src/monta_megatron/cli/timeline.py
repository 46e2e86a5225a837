"""`monta timeline`: overlap of a pass, recorded or predicted, as a picture and a trace."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli import planning
from monta_megatron.cli.bench import add_flags
from monta_megatron.cli.parser import add_json, only_the_report
from monta_megatron.common.files import make_folder
from monta_megatron.common.flags import whole
from monta_megatron.common.tables import Progress, print_report, tell
from monta_megatron.common.text import same_name
from monta_megatron.tools.bench.settings import FLAGS

if TYPE_CHECKING:
    from monta_megatron.chains import Chain
    from monta_megatron.planner.cluster import Cluster
    from monta_megatron.tools.timeline.drawing import Drawing

EXAMPLE = """\
examples:
  monta timeline --model configs/models/qwen3_235b_a22b.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --world-size 128 \\
      --tp 2 --ep 16 --pp 4 --out timeline
  monta emulate --nodes 2 --ranks-per-node 2 --inter-mbit 500 -- \\
      -m monta_megatron.cli timeline --record timeline \\
      --chain hierarchical_alltoall --experts 16 --top-k 4 \\
      --hidden 1024 --tokens 512
  monta timeline timeline/hierarchical_alltoall_x4.json --cluster cluster.yaml
"""

# Flags of `monta bench`, beside those that all three ways take.
RECORD_FLAGS = {
    **{name: FLAGS[name] for name in ("experts", "top-k", "hidden", "dtype")},
    "repeats": FLAGS["repeats"]._replace(help="passes, of which that of median time is kept"),
    "warmup": FLAGS["warmup"]._replace(help="passes before that"),
    "seed": FLAGS["seed"],
}

# The flags that each way takes, besides those for the output.
OUTPUT = {"out", "max_ranks", "json", "run", "command"}
PLANNED = ("world-size", "nodes", "ranks-per-node", "seq-length", "micro-batch-size")
WHAT = {"tokens", "tp", "ep", "etp", "phase", "chain", "num_chunks", "alone"}
TAKES = {
    "recording": {"cluster", "stock"},
    "record": {"cluster", *WHAT, "ranks_per_node", *(n.replace("-", "_") for n in RECORD_FLAGS)},
    "model": {"cluster", *WHAT, "cp", "pp", *(n.replace("-", "_") for n in PLANNED)},
}
WAYS = {"recording": "RECORDING", "record": "--record", "model": "--model"}
DEFAULTS = {"phase": "forward_backward", "alone": False}


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "timeline",
        help="draw what overlapped with what, recorded or predicted",
        description="Draw when every stage and chunk ran, by resource, below stock alltoall: a "
        "PNG, and a Chrome trace for https://ui.perfetto.dev. From a recording (with --cluster the "
        "cost model's view beside it), from the cost model (--model and --cluster), or recorded "
        "now (--record, one process per rank, under torchrun, srun or monta emulate).",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "recording",
        metavar="RECORDING",
        nargs="?",
        help="file of an earlier --record",
    )
    parser.add_argument(
        "--stock",
        metavar="PATH",
        help="RECORDING's counterpart with the chain alltoall, drawn above it",
    )
    planning.add_arguments(parser, (*PLANNED, "tp", "ep", "etp", "cp", "pp", "tokens"))
    parser.add_argument(
        "--phase",
        choices=("forward", "forward_backward"),
        default="forward_backward",
        help="passes that are drawn (default: %(default)s)",
    )
    parser.add_argument("--chain", metavar="NAME", help="default: the planner's choice")
    parser.add_argument("--num-chunks", metavar="N", type=whole(1), help="of --chain (default: 4)")
    record = parser.add_argument_group("with --record")
    record.add_argument("--record", metavar="DIR", help="record a run, and keep it there")
    add_flags(record, RECORD_FLAGS)
    parser.add_argument("--alone", action="store_true", help="leave stock alltoall out")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", metavar="DIR", help="for the files (default: where the recording is, or here)"
    )
    output.add_argument(
        "--max-ranks",
        metavar="N",
        type=whole(1),
        default=4,
        help="in the picture of a recording; the trace has all (default: %(default)s)",
    )
    add_json(output)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Draw; in a launch, only the first rank writes and prints."""
    from monta_megatron.common.ranks import run_as_rank

    return _run(parsed) if parsed.record is None else run_as_rank(lambda: _run(parsed))


def _run(parsed: argparse.Namespace) -> int:
    ways = {"recording": _read, "record": _record, "model": _predict}
    drawing = ways[_way(parsed)](parsed)
    if drawing is not None:
        _write(parsed, drawing)
    return 0


def _way(parsed: argparse.Namespace) -> str:
    """The way that these flags choose, one of three; a flag of another way is an error."""
    given = [
        name
        for name, value in vars(parsed).items()
        if value is not None and name not in OUTPUT and value != DEFAULTS.get(name)
    ]
    way = next((way for way in WAYS if way in given), None)
    if way is None:
        raise ValueError(f"{', '.join(WAYS.values())}: none given, must be one of them")
    for name in given:
        if name != way and name not in TAKES[way]:
            flag = WAYS.get(name, "--" + name.replace("_", "-"))
            value = getattr(parsed, name)
            raise ValueError(f"{flag}: got {value}, must be left out with {WAYS[way]}")
    if parsed.cluster is None and way == "model":
        raise ValueError("--cluster: not given, must be with --model")
    return way


def _read(parsed: argparse.Namespace) -> "Drawing":
    from monta_megatron.tools.timeline.drawing import of_recording

    stock = None if parsed.stock is None else Path(parsed.stock)
    return of_recording(Path(parsed.recording), _cluster(parsed), stock)


def _predict(parsed: argparse.Namespace) -> "Drawing":
    from monta_megatron.tools.timeline.drawing import of_prediction

    request = planning.request_of(parsed, phase=parsed.phase)
    return of_prediction(request, _chain(parsed), parsed.alone)


def _record(parsed: argparse.Namespace) -> "Drawing | None":
    """Record on this rank; None on all but the first."""
    from monta_megatron.common.ranks import find_this_rank
    from monta_megatron.tools.bench.settings import parse_settings

    given = _chain(parsed)
    this_rank = find_this_rank("timeline --record")
    flags = {**vars(parsed), "stock": "alltoall", "chains": "auto", "num_chunks": None}
    if given is not None:
        chain, num_chunks = given
        flags |= {"chains": chain.name, "num_chunks": str(num_chunks)}
    if not parsed.alone and flags["chains"] != "alltoall":
        flags["chains"] = f"alltoall,{flags['chains']}"
    settings = parse_settings(flags, this_rank.world_size)
    cluster = _cluster(parsed)
    folder = Path(parsed.record)
    # Fail before the run, not after it.
    if this_rank.rank == 0:
        make_folder(folder, "--record")

    with only_the_report():
        from monta_megatron.tools.timeline.record import record

        progress = Progress("timeline" if this_rank.rank == 0 else None)
        recordings = record(settings, this_rank, cluster, progress)
    if recordings is None:
        return None
    from monta_megatron.tools.timeline.drawing import of_recordings

    return of_recordings(recordings, folder, cluster)


def _cluster(parsed: argparse.Namespace) -> "Cluster | None":
    """The cluster of --cluster, if it is given."""
    from monta_megatron.tools.plan.request import cluster_of

    return None if parsed.cluster is None else cluster_of(parsed.cluster)


def _chain(parsed: argparse.Namespace) -> "tuple[Chain, int] | None":
    """The chain of --chain, and its number of chunks; None where none is named."""
    from monta_megatron.chains import CHAINS
    from monta_megatron.tools.timeline.drawing import named_chain

    name = parsed.chain and (same_name(parsed.chain, CHAINS) or parsed.chain)
    return named_chain(name, parsed.num_chunks, ("--chain", "--num-chunks"))


def _write(parsed: argparse.Namespace, drawing: "Drawing") -> None:
    """Write the trace and the picture, then print how much overlapped, as text or JSON."""
    from monta_megatron.tools import pictures
    from monta_megatron.tools.timeline.drawing import write

    folder = drawing.folder if parsed.out is None else Path(parsed.out)
    make_folder(folder, "--out")
    report = write(drawing, folder, parsed.max_ranks)
    if "picture" not in report.files:
        tell("timeline", f"no picture without matplotlib: {pictures.INSTALL}")
    print_report(report, parsed.json)
