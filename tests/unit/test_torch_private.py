"""The private names of torch that are used: all listed, and what they were, in this torch."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler

import monta_megatron
from monta_megatron.common.torch_private import (
    PRIVATE_NAMES,
    is_profiling,
    new_named_group,
    options_of,
    timeout_of,
)

pytestmark = pytest.mark.old_end

SOURCE = Path(monta_megatron.__file__).parent
FILE = "torch_private.py"
# Names with an underscore that are not torch's, or are documented.
NOT_TORCHS = {
    "_actions": "argparse",
    "_SubParsersAction": "argparse",
    "_fill_text": "argparse",
    "_exit": "os",
    "_initializing": "importlib's module specs",
    "_asdict": "typing.NamedTuple",
    "_replace": "typing.NamedTuple",
    "_global_process_group_list": "megatron.core.parallel_state",
    "_training_token_dispatcher": "Megatron's MoELayer",
    "_counts": "our own dispatcher, of which the first-use check makes a copy",
    "_kinds_of_rows": "likewise",
    "_C": "torch, documented for its DisableTorchFunction",
}


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    store, limit = dist.HashStore(), timedelta(seconds=77)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def owner_and_name(dotted: str) -> tuple[Any, str]:
    """The module or class that has a name, from its path."""
    path, _, name = dotted.rpartition(".")
    words = path.split(".")
    for end in range(len(words), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(words[:end]))
        except ImportError:
            continue
        for word in words[end:]:
            owner = getattr(owner, word)
        return owner, name
    raise AssertionError(f"{path} is no module")


@pytest.mark.parametrize("listed", PRIVATE_NAMES)
def test_torch_has_it_still(listed: str) -> None:
    dotted, _, parameters = listed.partition("(")
    try:
        owner, name = owner_and_name(dotted)
        value = getattr(owner, name)
    except AttributeError as error:
        pytest.fail(f"torch {torch.__version__} has no {dotted}: {error}")
    if parameters:
        takes = ", ".join(
            str(each.replace(annotation=inspect.Parameter.empty))
            for each in inspect.signature(value).parameters.values()
        )
        assert f"{takes})" == parameters, f"torch {torch.__version__}: {dotted} takes {takes}"


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names with an underscore that a file takes from something that is not `self`."""
    for node in ast.walk(tree):
        names: list[Any] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr] if ast.unparse(node.value) not in ("self", "cls") else []
        elif isinstance(node, ast.ImportFrom):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            names = [getattr(node.args[1], "value", None)]
        for name in names:
            if isinstance(name, str) and name.startswith("_") and not name.startswith("__"):
                yield name


def test_every_use_is_listed() -> None:
    listed = {dotted.partition("(")[0].rpartition(".")[2] for dotted in PRIVATE_NAMES}
    files = {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))
    }
    ours = {
        node.name
        for tree in files.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    unlisted, elsewhere = [], []
    for path, tree in files.items():
        where = path.relative_to(SOURCE)
        for name in private_names(tree):
            if name in listed:
                if path.name != FILE and where.parts[0] != "emulation":
                    elsewhere.append(f"{where}: {name}")
            elif name not in ours and name not in NOT_TORCHS:
                unlisted.append(f"{where}: {name}")
    assert unlisted == [], f"not among PRIVATE_NAMES of {FILE}"
    assert elsewhere == [], f"belongs in {FILE}"


def test_a_group_tells_its_time_limit(world: dist.ProcessGroup) -> None:
    assert options_of(world) is not None
    assert timeout_of(world) == timedelta(seconds=77)


def test_a_named_group_leaves_no_trace(world: dist.ProcessGroup) -> None:
    counted = dist.distributed_c10d._world.group_count
    group = new_named_group([0], "of our own", "for the log")
    assert (group.group_name, group.group_desc) == ("of our own", "for the log")
    assert dist.distributed_c10d._world.group_count == counted
    later = dist.new_group([0], use_local_synchronization=True)
    assert isinstance(later, dist.ProcessGroup) and later.group_name != "of our own"


def test_a_profile_is_noticed() -> None:
    assert not is_profiling()
    with profiler.profile():
        assert is_profiling()
    assert not is_profiling()
