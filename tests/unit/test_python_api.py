"""The functions of `import monta_megatron`: what the commands do, from names, files and objects."""

import ast
import json
from pathlib import Path
from typing import Any

import golden
from commands import Monta
from run_python import run_python

import monta_megatron
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.model import load_model

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES: dict[str, Any] = {"model": "mixtral_8x7b", "cluster": "a800_2x8_ib200", "ep": 8, "etp": 2}
FLAGS = ["--model", "mixtral_8x7b", "--cluster", "a800_2x8_ib200", "--ep", "8", "--etp", "2"]

WITHOUT_ANYTHING = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "numpy", "yaml", "matplotlib"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Refuse())
import monta_megatron
for name in monta_megatron.__all__:
    assert name in dir(monta_megatron) and getattr(monta_megatron, name).__doc__
assert monta_megatron.statistics() == []
assert not hasattr(monta_megatron, "plam")
"""


def test_it_is_there_on_a_bare_machine() -> None:
    path = f"import sys; sys.path.insert(0, {str(CONFIGS.parent / 'src')!r})\n"
    result = run_python("-I", "-S", "-c", f"{path}{WITHOUT_ANYTHING}")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_plan_is_that_of_the_command(monta: Monta) -> None:
    document = monta.document("plan", *FLAGS, "--tokens", "512")
    planned = monta_megatron.plan(**NAMES, tokens=512)
    assert document == json.loads(json.dumps(planned.document()))
    assert planned.ranking is None and (planned.layout.ep, planned.layout.etp) == (8, 2)
    assert document["memory"]["needed_bytes"] == planned.memory.needed_bytes


def test_a_plan_has_the_chosen_layout_and_the_ranking() -> None:
    planned = monta_megatron.plan(model="qwen3_30b_a3b", cluster="a100_hdr", world_size=16)
    assert planned.ranking is not None
    best = planned.ranking[0]
    assert all(getattr(best, name) == size for name, size in vars(planned.layout).items())
    assert (best.recommended, best.recommended_us) == (planned.recommended, planned.recommended_us)
    assert best.needed_bytes == planned.memory.needed_bytes


def test_names_files_and_objects_are_the_same() -> None:
    model, cluster = CONFIGS / "models/mixtral_8x7b.yaml", CONFIGS / "clusters/a800_2x8_ib200.yaml"
    by_name = monta_megatron.plan(**NAMES)
    layout = by_name.shape.layout
    assert (layout.ep, layout.etp, len(layout.nodes)) == (8, 2, 16)
    for given in (
        {"model": str(model), "cluster": cluster},
        {"model": load_model(model), "cluster": load_cluster(cluster)},
    ):
        assert monta_megatron.plan(**NAMES | given) == by_name


def test_bad_arguments() -> None:
    """One line each; those of files and sizes read as on the command line."""

    def answer(changes: str) -> str:
        return golden.refusal(monta_megatron.plan, **NAMES | ast.literal_eval(changes))

    golden.check_cases(Path(__file__).with_name("bad_arguments.txt"), answer)
