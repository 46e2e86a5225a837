"""`monta timeline`: what overlapped with what, recorded or predicted, as a picture and a trace."""

import argparse
import json
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli import planning
from monta_megatron.cli.bench import add_flags
from monta_megatron.cli.output import add_json, only_the_report, print_json
from monta_megatron.common.files import make_folder
from monta_megatron.common.flags import whole
from monta_megatron.common.quantities import counted
from monta_megatron.tools.bench.flags import FLAGS

if TYPE_CHECKING:
    from monta_megatron.chains import Chain
    from monta_megatron.planner.cluster import Cluster
    from monta_megatron.tools.timeline.recording import Recording
    from monta_megatron.tools.timeline.spans import Timeline

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
    "repeats": replace(
        FLAGS["repeats"], help="passes, of which that of median time is kept", default="5"
    ),
    "warmup": replace(FLAGS["warmup"], help="passes before that"),
    **{name: FLAGS[name] for name in ("seed", "ranks-per-node")},
}

# The flags that each way takes, besides those for the output.
OUTPUT = {"out", "max_ranks", "json", "run", "command"}
COSTS = {"cluster", "inter_rate_ratio"}
WHAT = {"tokens", "tp", "ep", "etp", "routing", "phase", "chain", "num_chunks"}
TAKES = {
    "recording": COSTS,
    "record": COSTS | WHAT | {name.replace("-", "_") for name in RECORD_FLAGS},
    "model": COSTS | WHAT | {"layout", "world_size", "cp", "pp", "ignore_memory"},
}
WAYS = {"recording": "RECORDING", "record": "--record", "model": "--model"}
DEFAULTS = {"routing": "uniform", "phase": "forward_backward", "ignore_memory": False}


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "timeline",
        help="draw what overlapped with what, recorded or predicted",
        description="Draw when every stage and chunk ran, by resource: a PNG, and a Chrome trace "
        "for https://ui.perfetto.dev. From a recording (with --cluster the cost model's view "
        "beside it), from the cost model (--model and --cluster), or recorded now (--record, one "
        "process per rank, under torchrun, srun or monta emulate).",
        epilog=EXAMPLE,
    )
    parser.add_argument("recording", metavar="RECORDING", nargs="?", help="of an earlier --record")
    planning.add_arguments(parser, needs_model=False)
    parser.add_argument("--chain", metavar="NAME", help="default: the planner's choice")
    parser.add_argument("--num-chunks", metavar="N", type=whole(1), help="of --chain (default: 4)")
    record = parser.add_argument_group("with --record")
    record.add_argument("--record", metavar="DIR", help="record a run, and keep it there")
    add_flags(record, RECORD_FLAGS)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", metavar="DIR", help="for the files (default: where the recording is, or here)"
    )
    output.add_argument(
        "--max-ranks",
        metavar="N",
        type=whole(1),
        default=4,
        help="in the picture; the trace has all (default: %(default)s)",
    )
    add_json(output)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Draw; in a launch, only the first rank writes and prints."""
    from monta_megatron.common.this_rank import run_as_rank

    return _run(parsed) if parsed.record is None else run_as_rank(lambda: _run(parsed))


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """What is drawn.

    Attributes:
        name: name of the files, without endings.
        folder: where they go unless --out is given.
        title: title of the picture.
        timelines: the timelines, drawn one above the other.
        recording: file of the recording, if there is one.
        notes: what the text says besides.
        about: metadata for the trace and for --json.
    """

    name: str
    folder: Path
    title: str
    timelines: "list[Timeline]"
    recording: Path | None = None
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any]


def _run(parsed: argparse.Namespace) -> int:
    ways = {"recording": _read, "record": _record, "model": _predict}
    drawing = ways[_way(parsed)](parsed)
    if drawing is not None:
        _write(parsed, drawing)
    return 0


def _way(parsed: argparse.Namespace) -> str:
    """Which of the three ways this is; a flag of another way is an error."""
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
    if parsed.cluster is None:
        for name in ("model", "inter_rate_ratio"):
            if name in given:
                flag = name.replace("_", "-")
                raise ValueError(f"--cluster: not given, must be with --{flag}")
    if parsed.num_chunks is not None and parsed.chain is None:
        raise ValueError(f"--num-chunks: got {parsed.num_chunks}, must be left out without --chain")
    return way


def _read(parsed: argparse.Namespace) -> _Drawing:
    from monta_megatron.tools.timeline.recording import Recording

    path = Path(parsed.recording)
    return _of_recording(Recording.load(path), path, _cluster(parsed))


def _predict(parsed: argparse.Namespace) -> _Drawing:
    from monta_megatron.chains import CHAINS
    from monta_megatron.tools.plan.request import plan_request
    from monta_megatron.tools.timeline.predicted import predict
    from monta_megatron.tools.timeline.spans import pipeline_name

    request, inputs = planning.read(parsed)
    cluster, layout = inputs.cluster, inputs.layout
    settings: dict[str, Any] = {}
    if parsed.chain is not None:
        chain, num_chunks = _chain(parsed)
        settings |= {"chains": (chain.name,), "num_chunks": (num_chunks,)}
    plan, workload, memory = plan_request(request, inputs, **settings)
    chain = CHAINS[plan.chain]
    sizes = f"TP {layout.tp}, EP {layout.ep}, ETP {layout.etp}"
    return _Drawing(
        name=f"{chain.name}_x{plan.num_chunks}",
        folder=Path(),
        title=f"{pipeline_name(chain.name, plan.num_chunks)}, predicted: {inputs.model.name} on "
        f"{cluster.name}, {sizes}, {counted(workload.tokens_per_rank, 'token')} per rank",
        timelines=[predict(workload, cluster, chain, plan.num_chunks, request.phase)],
        notes=[f"needs {memory.describe()}"],
        about={
            "cluster": cluster.name,
            "model": inputs.model.name,
            "notes": list(plan.notes),
            "memory": memory.document(),
        },
    )


def _record(parsed: argparse.Namespace) -> _Drawing | None:
    """Record on this rank; None on all but the first."""
    from monta_megatron.common.progress import show_progress
    from monta_megatron.common.this_rank import find_this_rank
    from monta_megatron.tools.bench.settings import parse_settings

    this_rank = find_this_rank("timeline --record")
    flags = {**vars(parsed), "stock": "alltoall", "chains": "auto", "num_chunks": None}
    flags["repeats"] = parsed.repeats or RECORD_FLAGS["repeats"].default
    if parsed.chain is not None:
        chain, num_chunks = _chain(parsed)
        flags |= {"chains": chain.name, "num_chunks": str(num_chunks)}
    settings = parse_settings(flags, this_rank.world_size)
    cluster = _cluster(parsed)
    folder = Path(parsed.record)
    # Fail before the run, not after it.
    if this_rank.rank == 0:
        make_folder(folder, "--record")

    with only_the_report():
        from monta_megatron.tools.timeline.record import record

        with show_progress("timeline", this_rank.rank == 0) as progress:
            recording = record(settings, this_rank, cluster, progress)
    if recording is None:
        return None
    path = folder / f"{recording.chain}_x{recording.num_chunks}.json"
    recording.save(path)
    return _of_recording(recording, path, cluster)


def _of_recording(recording: "Recording", path: Path, cluster: "Cluster | None") -> _Drawing:
    timelines = [] if cluster is None else [recording.predicted(cluster)]
    return _Drawing(
        name=path.stem,
        folder=path.parent,
        title=recording.title,
        timelines=[*timelines, recording.timeline],
        recording=path,
        about={
            "clock": recording.clock,
            "clock_error_us": recording.clock_error_us,
            "cluster": None if cluster is None else cluster.name,
            "recorded": recording.meta,
        },
    )


def _cluster(parsed: argparse.Namespace) -> "Cluster | None":
    """The cluster of --cluster, if it is given."""
    from monta_megatron.tools.plan.request import cluster_with_rate

    if parsed.cluster is None:
        return None
    return cluster_with_rate(parsed.cluster, parsed.inter_rate_ratio)


def _chain(parsed: argparse.Namespace) -> "tuple[Chain, int]":
    """The chain of --chain, and its number of chunks."""
    from monta_megatron.chains import CHAINS, check_chain, chunks_of

    check_chain(parsed.chain, "--chain")
    chain = CHAINS[parsed.chain]
    return chain, chunks_of(chain, parsed.num_chunks, "--num-chunks")


def _write(parsed: argparse.Namespace, drawing: _Drawing) -> None:
    """Write the trace and the picture, then print how much overlapped, as text or JSON."""
    from monta_megatron.common import strict_yaml
    from monta_megatron.common.files import write_whole
    from monta_megatron.tools import pictures
    from monta_megatron.tools.timeline.overlap import overlap_table, overlaps
    from monta_megatron.tools.timeline.picture import draw
    from monta_megatron.tools.timeline.trace import chrome_trace

    folder = drawing.folder if parsed.out is None else Path(parsed.out)
    make_folder(folder, "--out")
    trace, png = folder / f"{drawing.name}.trace.json", folder / f"{drawing.name}.png"
    write_whole(trace, json.dumps(chrome_trace(drawing.timelines, drawing.about)) + "\n")
    files = {"trace": str(trace)}
    if drawing.recording is not None:
        files["recording"] = str(drawing.recording)
    if pictures.can_draw():
        draw(drawing.timelines, drawing.title, png, parsed.max_ranks)
        files["picture"] = str(png)
    else:
        advice = pictures.INSTALL
        print(f"monta timeline: no picture without matplotlib: {advice}", file=sys.stderr)

    overlaps_of = [overlaps(timeline) for timeline in drawing.timelines]
    if parsed.json:
        document = {
            "title": drawing.title,
            "overlaps": [strict_yaml.plain(row) for rows in overlaps_of for row in rows],
            "files": files,
            "about": drawing.about,
        }
        print_json(document)
        return
    lines = [line for text in (drawing.title, *drawing.notes) for line in textwrap.wrap(text, 80)]
    for rows in overlaps_of:
        lines += ["", overlap_table(rows)]
    print("\n".join([*lines, "", *(f"{kind:<10}{path}" for kind, path in files.items())]))
