"""`monta plan`: which chain, in how many chunks, and why; or which layout."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import fraction, name_of, not_negative, positive, whole
from monta_megatron.common.tables import print_json
from monta_megatron.common.text import command_line
from monta_megatron.common.units import bytes_of_gb

if TYPE_CHECKING:
    from monta_megatron.tools.plan.request import PlanInputs

EXAMPLE = """\
examples:
  monta plan --model configs/models/deepseek_v3.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --world-size 1024 \\
      --ep 64 --pp 16
  monta plan --model configs/models/mixtral_8x7b.yaml \\
      --cluster configs/clusters/a800_2x8_ib200.yaml --json
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "plan",
        help="choose a chain, or rank the layouts",
        description="Choose the chain and the number of chunks for a layout, from the costs of the "
        "cluster. Without --layout, --tp, --ep and --etp: every layout that fits, ranked.",
        epilog=EXAMPLE,
    )
    planning.add_arguments(parser)
    planning.add_overlap_experts(parser)
    parser.add_argument(
        "--memory-limit-gb", metavar="X", type=positive, help="what the exchange may hold"
    )
    parser.add_argument(
        "--margin",
        metavar="X",
        type=fraction,
        help="by how much a plainer chain may be slower (default: 0.03)",
    )
    parser.add_argument(
        "--beside-us",
        metavar="X",
        type=not_negative,
        default=0.0,
        help="other work (experts, shared experts, another micro-batch) that runs beside the "
        "exchange of a layer and micro-batch, in us: what it leaves over is minimized",
    )
    parser.add_argument(
        "--chain",
        metavar="NAME",
        type=name_of(_chains),
        help="say where this chain stands, and why it was not chosen",
    )
    parser.add_argument("--num-chunks", metavar="N", type=whole(1), help="of --chain")
    parser.add_argument("--out", metavar="FILE", help="write the plan, for --moe-monta-plan")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    parser.add_argument(
        "--program", action="store_true", help="show every operation of the chosen chain's passes"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _chains() -> Iterable[str]:
    from monta_megatron.chains import CHAINS

    return CHAINS


def run(parsed: argparse.Namespace) -> int:
    """Print the plan, or the ranking."""
    from monta_megatron.common import strict_yaml
    from monta_megatron.planner.flex import predict_flex
    from monta_megatron.planner.select import MARGIN
    from monta_megatron.tools.plan.report import (
        layout_lines,
        note_lines,
        plan_lines,
        program_lines,
        program_of,
        ranked_by_lines,
        rate_lines,
        standing_lines,
    )
    from monta_megatron.tools.plan.request import benefit_of_plan, candidate_of, plan_request

    if parsed.out is not None and not parsed.force and Path(parsed.out).is_file():
        raise ValueError(f"--out: got {parsed.out}, must not exist; --force overwrites it")
    reason = "how long other work takes depends on the tokens of a rank"
    if parsed.beside_us > 0:
        planning.check_has_layout(parsed, f"--beside-us: got {parsed.beside_us:g}", reason)
    if parsed.overlap_experts:
        planning.check_has_layout(parsed, "--overlap-experts: given", reason)
    if parsed.chain is not None:
        planning.check_has_layout(parsed, f"--chain: got {parsed.chain}", "it stands in a plan")
    elif parsed.num_chunks is not None:
        raise ValueError(f"--num-chunks: got {parsed.num_chunks}, must be with --chain")
    settings: dict[str, Any] = {
        "memory_limit_bytes": bytes_of_gb(parsed.memory_limit_gb),
        "margin": MARGIN if parsed.margin is None else parsed.margin,
    }
    request, inputs = planning.read(parsed, **settings)
    beside = {"beside_us": parsed.beside_us}
    plan, workload, memory = plan_request(request, inputs, **beside, **settings)
    asked = None
    if parsed.chain is not None:
        asked = candidate_of(request, inputs, plan, parsed.chain, parsed.num_chunks, **beside)
    benefit = benefit_of_plan(request, inputs, plan)
    # The other dispatchers have no price with their experts.
    flex = [] if request.overlap_experts else predict_flex(workload, inputs.cluster, request.phase)
    programs = program_of(plan, workload, inputs.cluster) if parsed.program else {}
    collaboration = _collaboration(parsed.routing, inputs)
    if parsed.out is not None:
        plan.save(parsed.out)
        print(f"monta plan: wrote {parsed.out}", file=sys.stderr)
    if parsed.json:
        document = strict_yaml.plain(plan)
        document["memory"] = memory.document()
        document["flex"] = [vars(entry) for entry in flex]
        document["benefit"] = None if benefit is None else benefit.document()
        document["layouts"] = None if inputs.ranking is None else strict_yaml.plain(inputs.ranking)
        if collaboration is not None:
            document["collaboration"] = collaboration[0]
        if parsed.program:
            document["operations"] = programs
        if asked is not None:
            document["asked"] = strict_yaml.plain(asked)
        print_json(document)
    else:
        lines = (
            plan_lines(plan, memory, benefit, flex)
            if inputs.ranking is None
            else [
                *rate_lines(plan),
                *note_lines(plan),
                "",
                *layout_lines(inputs.ranking, memory, benefit),
                *ranked_by_lines(_estimate_command(parsed, inputs)),
            ]
        )
        if asked is not None:
            lines = [*standing_lines(plan, asked), "", *lines]
        if collaboration is not None:
            lines += ["", *collaboration[1]]
        if parsed.program:
            lines += ["", *program_lines(programs)]
        print("\n".join([f"{inputs.model.name} on {inputs.cluster.name}", "", *lines]))
    return 0


def _estimate_command(parsed: argparse.Namespace, inputs: "PlanInputs") -> list[str]:
    """The command that ranks the same layouts by their whole iteration, and its flags."""
    flags = {
        "--model": parsed.model,
        "--cluster": parsed.cluster,
        "--world-size": str(inputs.layout.world_size),
    }
    return ["monta estimate", *map(command_line, flags.items())]


def _collaboration(routing: str, inputs: "PlanInputs") -> tuple[Any, list[str]] | None:
    """Of a trace: which experts tokens choose together, for --json and to print."""
    if not Path(routing).is_dir():
        return None
    from monta_megatron.tools.place.report import (
        collaboration_document,
        collaboration_lines,
        collaboration_of_trace,
    )

    layers = collaboration_of_trace(routing, inputs.model, inputs.cluster, inputs.layout)
    if isinstance(layers, str):
        return {"unknown": layers}, [f"collaboration of experts: not shown: {layers}"]
    return collaboration_document(layers), collaboration_lines(layers)
