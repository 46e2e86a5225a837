"""Functions that run on the ranks of a pool: training iterations of two MoE layers."""

import contextlib
import dataclasses
import io
import os
import signal
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from equal import assert_equal
from layers import (
    HIDDEN,
    Case,
    build_layer,
    capturing_preprocess,
    force,
    forced_routing,
    make_batch,
    phases,
    seeded_by_rank,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How the layers are trained.

    `recompute` is "full", "selective" or "". Every `evaluates`-th iteration is followed by an
    evaluation of more tokens, every `skips`-th one's step is skipped.
    """

    num_iterations: int
    num_micro_batches: int = 1
    recompute: str = ""
    evaluates: int = 0
    skips: int = 0


class Model:
    """Two layers that share an exchange, each with an optimizer of its own."""

    def __init__(self, case: Case, dispatcher: str, training: Training) -> None:
        from monta_megatron.integration import controller

        if training.recompute == "selective":
            config = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
            case = dataclasses.replace(case, config={**case.config, **config})
        controller._shared.clear()
        options = {"moe_monta_chain": "auto"} | case.options
        case = dataclasses.replace(case, options=options)
        self.case, self.training = case, training
        self.layers = [build_layer(case, dispatcher) for _ in range(2)]
        for layer in self.layers:
            layer.train()
        self.optimizers = [
            torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9) for layer in self.layers
        ]
        self.ran: list[set[tuple[str, int]]] = []

    @property
    def choices(self) -> Any:
        """What both layers share."""
        first, second = (layer.token_dispatcher.controller for layer in self.layers)
        assert first is second
        return first

    def forward(self, generator: torch.Generator, num_tokens: int) -> torch.Tensor:
        from megatron.core.tensor_parallel import checkpoint

        hidden = torch.randn(num_tokens, 1, HIDDEN, generator=generator).to("cuda")
        hidden.requires_grad_()
        for layer in self.layers:
            force(layer.router, forced_routing(self.case, num_tokens, generator))

            def run(rows: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                return rows + layer(rows)[0]

            full = self.training.recompute == "full" and torch.is_grad_enabled()
            hidden = checkpoint(run, False, hidden) if full else run(hidden)
            dispatcher = layer.token_dispatcher
            if self.ran and hasattr(dispatcher, "num_chunks"):
                self.ran[-1].add((dispatcher.chain.name, dispatcher.num_chunks))
        return hidden.square().mean()

    def iterate(self, number: int, num_tokens: int | None = None) -> list[float]:
        """An iteration; the losses of its micro-batches and of the evaluation after it."""
        training = self.training
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.ran.append(set())
        losses = []
        for _ in range(training.num_micro_batches):
            loss = self.forward(generator, num_tokens or self.case.num_tokens)
            loss.backward()
            losses.append(loss.item())
        if not (training.skips and (number + 1) % training.skips == 0):
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if training.evaluates and (number + 1) % training.evaluates == 0:
            for layer in self.layers:
                layer.eval()
            with torch.no_grad():
                losses.append(self.forward(generator, 4 * self.case.num_tokens).item())
            for layer in self.layers:
                layer.train()
        return losses


def train(
    case: Case, dispatcher: str, training: Training
) -> tuple[list[list[float]], list[list[tuple[str, int]]]]:
    """The losses of each iteration, and what ran in it."""
    model = Model(case, dispatcher, training)
    losses = [model.iterate(number) for number in range(training.num_iterations)]
    return losses, [sorted(ran) for ran in model.ran]


def numbers_of_iterations(case: Case, training: Training) -> list[int]:
    """The number of the decision after each iteration."""
    model = Model(case, "monta", training)
    numbers = []
    for number in range(training.num_iterations):
        model.iterate(number)
        numbers.append(model.choices.decision.number)
    return numbers


def numbers_of_timed_passes(case: Case, training: Training) -> list[int]:
    """How many passes were timed in each iteration that was."""
    from monta_megatron.exchange.pass_times import PassTimes

    model, collect = Model(case, "monta", training), PassTimes.collect
    numbers = []

    def counting(times: PassTimes) -> Any:
        passes = collect(times)
        numbers.append(len(passes))
        return passes

    with mock.patch.object(PassTimes, "collect", counting):
        for number in range(training.num_iterations):
            model.iterate(number)
    return [number for number in numbers if number]


def tuned(case: Case, training: Training) -> dict[str, Any]:
    """What a rank says, and what the tuning has found."""
    from monta_megatron.integration import ranks

    ranks._reported.clear()
    model = Model(case, "monta", training)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for number in range(training.num_iterations):
            model.iterate(number)
    tuning = model.choices.decision.tuning
    return {
        "said": said.getvalue().splitlines(),
        "steps": [step.candidate for step in tuning.steps],
        "settled_us": tuning.settled_us,
        "winner": tuning.candidates[tuning.winner].key,
        "ran": [sorted(ran) for ran in model.ran],
    }


def checked_in_each_use(case: Case, training: Training) -> tuple[list[int], bool]:
    """Chains that are checked in each forward pass of a layer.

    Returns:
        numbers of chains; whether all candidates are among those of the first pass.
    """
    from monta_megatron.integration import checks

    check, numbers, of_first = checks.check_chains, [], set[tuple[str, int]]()

    def counting(*args: Any) -> None:
        before = len(checks._checked_chains)
        check(*args)
        numbers.append(len(checks._checked_chains) - before)
        if before == 0:
            of_first.update((name, chunks) for _, _, name, chunks in checks._checked_chains)

    checks._checked_chains.clear()
    model = Model(case, "monta", training)
    with mock.patch.object(checks, "check_chains", counting):
        for number in range(training.num_iterations):
            model.iterate(number)
    candidates = model.choices.decision.tuning.candidates
    return numbers, {candidate.key for candidate in candidates} <= of_first


def end_more_often(case: Case, rank: int) -> None:
    """One rank counts an iteration that the others do not."""
    model = Model(case, "monta", Training(num_iterations=3))
    model.iterate(0)
    if dist.get_rank() == rank:
        model.choices._numbers_of_tokens.add(1)
        model.choices.end_iteration()
    model.iterate(1)


def die_in_gathering(victim: int) -> tuple[str, float]:
    """One rank is killed before it sends its figures; what the others say, and when."""
    from monta_megatron.exchange.counts import Gathering
    from monta_megatron.exchange.errors import ExchangeError

    gathering = Gathering(dist.group.WORLD, "between iterations: exchange of traffic")
    gathering.start([dist.get_rank(), 7], torch.device("cpu"), torch.cuda.Stream())
    table = gathering.finish()
    assert table.tolist() == [[rank, 7] for rank in range(dist.get_world_size())]
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        gathering.start([1], torch.device("cpu"), torch.cuda.Stream())
        gathering.finish()
    except ExchangeError as error:
        dist.destroy_process_group()
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def compare_changing_tokens(case: Case, tokens: list[int]) -> list[tuple[str, str, bool]]:
    """Iterations of so many tokens a rank, against stock.

    Returns:
        for each the chain, where the counts were waited for, and whether rows entered again.
    """
    from monta_megatron.integration.strategies import STRATEGIES

    training = Training(num_iterations=len(tokens))
    stock, ours = Model(case, "alltoall", training), Model(case, "monta", training)
    dispatcher = ours.layers[0].token_dispatcher
    seen = []
    for number, num_tokens in enumerate(tokens):
        with contextlib.ExitStack() as stack:
            entered = [
                stack.enter_context(mock.patch.object(each, "enter", wraps=each.enter))
                for each in STRATEGIES.values()
            ]
            assert ours.iterate(number, num_tokens) == stock.iterate(number, num_tokens)
        entered_again = sum(each.call_count for each in entered) > len(ours.layers)
        seen.append((dispatcher.chain.name, dispatcher.cuda_sync_point, entered_again))
    return seen


def replay_between_decisions(case: Case, num_iterations: int) -> list[tuple[int, str, int]]:
    """Iterations of a layer whose preprocess is replayed: its Python ran once, when captured.

    A replay brings back what was counted, by the attributes that Megatron lists.

    Returns:
        after each iteration its number, and the chain and number of chunks that ran.
    """
    from monta_megatron.integration import controller

    controller._shared.clear()
    with capturing_preprocess():
        dispatcher = build_layer(case, "monta").token_dispatcher
    hidden, routing_map = make_batch(case, seeded_by_rank())
    expected = phases(dispatcher, hidden, routing_map)[1]
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    probs = routing_map / routing_map.sum(dim=1, keepdim=True)
    hidden = (hidden * weight).detach()
    captured = dispatcher.dispatch_preprocess(hidden, routing_map.clone(), probs)
    attributes = {
        name: value.clone()
        for name in dispatcher.cudagraph_attrs
        if isinstance(value := getattr(dispatcher, name, None), torch.Tensor)
    }
    seen = []
    for _ in range(num_iterations):
        for name, value in attributes.items():
            setattr(dispatcher, name, value.clone())
        rows, row_probs = (each.detach().clone() for each in captured)
        rows, row_probs = dispatcher.token_dispatch(rows * weight, row_probs)
        rows, _, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        output = dispatcher.combine_preprocess(rows * row_probs[:, None])
        output = dispatcher.combine_postprocess(dispatcher.token_combine(output))
        output.sum().backward()
        assert_equal(output.detach(), expected, "the replayed batch")
        optimizer.step()
        number = dispatcher.controller.decision.number
        seen.append((number, dispatcher.chain.name, dispatcher.num_chunks))
    return seen
