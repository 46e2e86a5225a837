"""Functions that run on the ranks of a pool: layers with their experts in the pipeline."""

import dataclasses
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from layers import (
    HIDDEN,
    Case,
    assert_close,
    assert_same_results,
    build_layer,
    compare,
    force,
    forced_routing,
    forward_backward,
)


def compare_split(case: Case, chunks: list[int]) -> None:
    """As `compare`, but no rows of whole batches may come to the experts."""
    for num_chunks in chunks:
        report = compare(case, [num_chunks])
        assert (report["tokens"] == 0) == (num_chunks > 1), "they did not run in the pipeline"


def compare_chosen(case: Case, tokens: list[list[int]]) -> list[bool]:
    """Steps of a layer whose planner chooses, against stock: whether its experts were split."""
    layer, stock = build_layer(case, "monta"), build_layer(case, "alltoall")
    pipelined = []
    for step, of_ranks in enumerate(tokens):
        case = dataclasses.replace(case, num_tokens=of_ranks[dist.get_rank()], seed=step)
        results = [forward_backward(case, each) for each in (layer, stock)]
        assert_same_results(*results, False, f"step {step}")
        pipelined.append(layer.token_dispatcher.experts_pipelined)
    return pipelined


def compare_frozen(case: Case, num_chunks: int) -> None:
    """Experts without gradients: those of the rows and of the router are stock's."""
    results = []
    for dispatcher in ("alltoall", "monta"):
        options = {"moe_monta_num_chunks": num_chunks} if dispatcher == "monta" else {}
        layer = build_layer(case, dispatcher, **options)
        layer.experts.requires_grad_(False)
        results.append(forward_backward(case, layer))
    stock, ours = results
    assert ours.weight_gradients.keys() == stock.weight_gradients.keys() == {"router.weight"}
    assert_close(ours.input_gradient, stock.input_gradient, False, "frozen experts")


def compare_recomputed(case: Case, num_chunks: int) -> None:
    """A layer inside Megatron's checkpoint, as full recomputation has it."""
    from megatron.core.tensor_parallel import checkpoint

    results = []
    for is_recomputed in (False, True):
        layer = build_layer(case, "monta", moe_monta_num_chunks=num_chunks)
        if is_recomputed:
            whole = layer.forward
            layer.forward = lambda hidden, whole=whole: (
                checkpoint(lambda hidden: whole(hidden)[0], False, hidden),
                None,
            )
        results.append(forward_backward(case, layer))
    for name in ("output", "input_gradient"):
        # The same calls in the same order: equal to the bit.
        assert torch.equal(*(getattr(result, name) for result in results)), name


def state_dict_keys(case: Case) -> bool:
    """Whether a layer's state dict is that of a layer without the pipeline."""
    stock, ours = (build_layer(case, dispatcher) for dispatcher in ("alltoall", "monta"))
    return list(stock.state_dict()) == list(ours.state_dict())


def train(
    case: Case, chunks_of_step: list[int], num_micro_batches: int
) -> tuple[dict[str, torch.Tensor], Counter[int]]:
    """Steps of the distributed optimizer over data-parallel ranks, gradients reduced meanwhile.

    Args:
        case: the layer.
        chunks_of_step: numbers of chunks of each step.
        num_micro_batches: whose gradients are accumulated in a step.

    Returns:
        the layer's parameters, and calls of a parameter's hook in a micro-batch -> how often.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    layer = build_layer(case, "monta", moe_monta_num_chunks=max(chunks_of_step))
    choices = layer.token_dispatcher._choices
    policy = choices._policy
    model = DistributedDataParallel(
        layer.config,
        DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True),
        layer,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, use_distributed_optimizer=True, params_dtype=torch.float32
        ),
        [model],
    )
    calls: Counter[str] = Counter()
    accumulators = []
    for name, parameter in layer.named_parameters():
        (accumulator,) = [parameter.expand_as(parameter).grad_fn.next_functions[0][0]]
        accumulator.register_hook(lambda *_, name=name: calls.update([name]))
        accumulators.append(accumulator)

    numbers_of_calls: Counter[int] = Counter()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for num_chunks in chunks_of_step:
        choices._policy = dataclasses.replace(policy, num_chunks=(num_chunks,))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for micro_batch in range(num_micro_batches):
            force(layer.router, forced_routing(case, case.num_tokens, generator))
            hidden = torch.randn(case.num_tokens, 1, HIDDEN, generator=generator).to("cuda")
            target = torch.randn(case.num_tokens, 1, HIDDEN, generator=generator).to("cuda")
            calls.clear()

            def step(hidden: torch.Tensor = hidden, target: torch.Tensor = target) -> None:
                output, _ = model(hidden)
                (output - target).square().mean().backward()

            if micro_batch < num_micro_batches - 1:
                with model.no_sync():
                    step()
            else:
                step()
            assert layer.token_dispatcher.num_chunks == num_chunks
            numbers_of_calls.update(calls[name] for name, _ in layer.named_parameters())
        model.finish_grad_sync()
        optimizer.step()
    parameters = {name: each.detach().clone() for name, each in layer.named_parameters()}
    return parameters, numbers_of_calls


def compare_trainings(case: Case, chunks_of_step: list[int], num_micro_batches: int) -> float:
    """The largest difference of a parameter after the steps, in units of the largest parameter."""
    split, calls = train(case, chunks_of_step, num_micro_batches)
    assert calls.keys() == {1}, f"calls of a hook in a micro-batch: {calls}"
    whole, _ = train(case, [1] * len(chunks_of_step), num_micro_batches)
    before = dict(build_layer(case, "monta", moe_monta_num_chunks=1).named_parameters())
    for name, value in whole.items():
        assert not torch.equal(value, before[name]), f"{name} was not trained"
    return max(
        float((split[name] - value).abs().max() / value.abs().max())
        for name, value in whole.items()
    )


def refusal(case: Case, **settings: Any) -> str:
    """The error with which a layer is refused."""
    try:
        layer = build_layer(case, "monta", **settings)
    except ValueError as error:
        return str(error)
    return f"built {type(layer).__name__}"
