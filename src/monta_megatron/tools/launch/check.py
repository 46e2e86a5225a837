"""A run's arguments, checked by the Megatron that it will start."""

import json
import os
import subprocess
import sys
from dataclasses import replace

from monta_megatron.integration.megatron_arguments import Answer
from monta_megatron.tools.launch.prepare import Run


def checked(run: Run, force: bool = False) -> Run:
    """The run with the Megatron-Core version that checked it, and notes on what is in doubt.

    Args:
        run: the run.
        force: go on where Megatron's validation refuses the arguments taken together.

    Raises:
        ValueError: Megatron refuses an argument, named with the nearest one that exists, or all of
            them together.
    """
    answer = _ask(run)
    if answer.problem is not None:
        sources = [argument.source for argument in run.arguments.values()]
        where = "" if answer.position is None else f"{sources[answer.position]}: "
        raise ValueError(f"{where}{answer.problem}")
    notes = list(run.notes)
    if answer.unchecked is not None:
        notes.append(
            f"arguments not checked: {answer.unchecked}; pip install 'megatron-core[training]', or "
            "set MEGATRON_LM_DIR to a checkout of Megatron-LM"
        )
    if answer.doubt is not None:
        doubt = f"Megatron's validation refuses this, if ranks are as here: {answer.doubt}"
        if not force:
            raise ValueError(f"{doubt}; --force goes on where the ranks are not as here")
        notes.append(doubt)
    megatron = None if answer.unchecked is not None else answer.megatron
    return replace(run, megatron=megatron, notes=tuple(notes))


def _ask(run: Run) -> Answer:
    environment = {
        **os.environ,
        **{name: str(value) for name, value in run.config.environment.items()},
        "WORLD_SIZE": str(run.config.layout.parallel.world_size),
        "RANK": "0",
        "PYTHONWARNINGS": "ignore",
    }
    if environment.get("MONTA_CPU_RANKS") == "1":
        # The same default that CPU ranks set in the run itself.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "monta_megatron.integration.megatron_arguments"),
            os.path.dirname(run.script),
        ],
        input=json.dumps([argument.words for argument in run.arguments.values()]),
        # The stand-ins let Megatron be imported without a GPU, such as on a login node.
        env={**environment, "MONTA_CPU_RANKS": "1"},
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Answer(unchecked=f"Megatron's parser failed: {last}")
    return Answer(**json.loads(result.stdout))
