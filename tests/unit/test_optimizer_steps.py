"""Steps that count: Megatron's outermost ones, else PyTorch's. Each check has a fresh process."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Generic, TypeVar
from unittest import mock

import pytest
import torch
from preloaded import Preloaded

pytest.importorskip("megatron.core.optimizer.optimizer_cuda_graph", reason="since 0.17")
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

from monta_megatron.integration import auto
from monta_megatron.integration.auto import AutoChooser
from monta_megatron.integration.optimizer_steps import call_at_steps
from monta_megatron.planner.tuning import Tuner

T = TypeVar("T")
called: list[Any] = []


def of_torch() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=0.5)


def of_megatron(kind: type, inner: torch.optim.Optimizer | None) -> Any:
    """One of Megatron's without what it makes on a GPU; a stub if there is nothing to train."""
    made: Any = object.__new__(kind)
    made.config = OptimizerConfig(optimizer="sgd", lr=0.5, clip_grad=0.0)
    made.optimizer, made.is_stub_optimizer = inner, inner is None
    return made


def chain(*inner: torch.optim.Optimizer | None) -> Any:
    made: Any = ChainedOptimizer([of_megatron(FP32Optimizer, each) for each in inner])
    made.get_grad_norm = lambda: 0.0
    return made


def chains_stubs_and_skipped_steps_count_once() -> None:
    first, stub = chain(of_torch(), of_torch()), chain(None)
    assert first.step()[0] and stub.step()[0] and called == [first, stub]
    assert first.chained_optimizers[1].optimizer.param_groups[0]["params"][0].item() == 0.5
    first.prepare_grads = lambda: True
    assert not first.step()[0] and called == [first, stub, first]


def a_class_that_is_defined_later_counts_once() -> None:
    class Later(FP32Optimizer, Generic[T]):
        def step(self) -> Any:
            return super().step()

    assert Later[int].__origin__ is Later  # type: ignore[attr-defined]
    later = of_megatron(Later, of_torch())
    assert later.step()[0] and called == [later]


def a_captured_step_counts_and_nothing_inside() -> None:
    replay: Any = OptimizerCudaGraphWrapper(chain(of_torch()).step, cuda_graph_warmup_steps=2)
    assert replay()[0] and called == [replay]
    OptimizerCudaGraphWrapper.cuda_graph = SimpleNamespace(replay=lambda: None)
    assert replay()[0] and called == [replay, replay]


def optimizers_of_torch_count_by_themselves_after_an_exception_too() -> None:
    broken, first, second = chain(of_torch()), of_torch(), of_torch()
    broken.prepare_grads = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        broken.step()
    first.step()
    second.step()
    assert called == [broken, first, second]


def states_that_are_made_before_a_checkpoint_is_loaded_count_nothing() -> None:
    loading: Any = SimpleNamespace(optimizer=of_torch())
    DistributedOptimizer._init_optimizer_states_with_dummy_values(loading)
    assert called == []


def counted(check: Callable[[], None]) -> None:
    call_at_steps(called.append)
    check()


def test_steps() -> None:
    preloaded = Preloaded("megatron.core.optimizer")
    for check in (
        chains_stubs_and_skipped_steps_count_once,
        a_class_that_is_defined_later_counts_once,
        a_captured_step_counts_and_nothing_inside,
        optimizers_of_torch_count_by_themselves_after_an_exception_too,
        states_that_are_made_before_a_checkpoint_is_loaded_count_nothing,
    ):
        result = preloaded.run(counted, check)
        assert result.returncode == 0, result.stderr
    preloaded.close()


def test_an_optimizer_that_comes_later_takes_up_the_count() -> None:
    """Two that alternate make one step; a wrapper that is made anew goes on from there."""
    unused: Any = SimpleNamespace()
    ranks = {"get_process_group_ranks": lambda _: [0], "get_rank": lambda: 0}
    alone = SimpleNamespace(**ranks, get_group_rank=lambda *_: 0)
    with mock.patch.object(auto, "dist", alone):
        chooser = AutoChooser(Tuner(planner=unused, num_steps=6, report=print), False, {}, unused)
    first, second, later = of_torch(), of_torch(), of_torch()
    for optimizer in (first, second, first, second, first, second):
        chooser.enter_step(optimizer)
    assert chooser.tuner.step == 3
    for optimizer in (later, later, later):
        chooser.enter_step(optimizer)
    assert chooser.tuner.step == 5
