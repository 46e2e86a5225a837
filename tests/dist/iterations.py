"""Functions that run on the ranks of a pool: training steps while candidates are tried.

A rank notes what every exchange of its layers ran in, so that ranks can be compared.
"""

import contextlib
import dataclasses
import io
from collections.abc import Iterator
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

from monta_megatron.common import first_rank

# Shape of a layer, number of a step, choice and whether the layer trained, of one exchange.
Exchange = tuple[int, int, str, bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How layers are trained.

    Two layers, each with an optimizer of its own; `shapes` of them: 1 or 2. `recompute` is "full",
    "selective", "not reentrant" or "". Every `evaluates`-th step is followed by an evaluation of
    more tokens, by the replicas `evaluating`. Replicas are the exchanges: replica r leaves the MoE
    layers out in the steps `absent[r]`, and has `micro_batches[r]`. Rank r of the step s has
    `tokens[(r + s) % len(tokens)]` tokens, or the case's.
    """

    num_steps: int
    micro_batches: tuple[int, ...] = (1, 1)
    shapes: int = 1
    recompute: str = ""
    evaluates: int = 0
    evaluating: tuple[int, ...] = (0, 1)
    absent: tuple[tuple[int, ...], ...] = ((), ())
    tokens: tuple[int, ...] = ()


class Model:
    """Layers of one or two shapes, and a dense weight that every step trains."""

    def __init__(
        self, case: Case, dispatcher: str, training: Training, is_first: bool = True
    ) -> None:
        from monta_megatron.integration import auto

        if training.recompute == "selective":
            config = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
            case = dataclasses.replace(case, config={**case.config, **config})
        if is_first:
            auto._shared.clear()
        options = {"moe_monta_chain": "auto"} | case.options
        self.case, self.training = dataclasses.replace(case, options=options), training
        self.replica = dist.get_rank() // (case.ep * case.etp) % 2
        self.cases = [self.case, self.case]
        if training.shapes == 2:
            self.cases[1] = dataclasses.replace(
                self.case, num_local_experts=2 * case.num_local_experts
            )
        self.layers = [build_layer(each, dispatcher).train() for each in self.cases]
        self.optimizers = [
            torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9) for layer in self.layers
        ]
        self.exchanges: list[Exchange] = []
        if dispatcher == "monta":
            for number, layer in enumerate(self.layers):
                self._note(number, layer.token_dispatcher)

    @property
    def choosers(self) -> list[Any]:
        """Of each layer."""
        return [layer.token_dispatcher.chooser for layer in self.layers]

    def _note(self, number: int, dispatcher: Any) -> None:
        bind, shape = dispatcher._bind, number % self.training.shapes

        def noting(counts: Any) -> None:
            tuner = getattr(dispatcher.chooser, "tuner", None)
            step = 0 if tuner is None else tuner.step
            bind(counts)
            is_training = dispatcher.moe_layer().training
            self.exchanges.append((shape, step, dispatcher.choice.name, is_training))

        dispatcher._bind = noting

    def forward(self, generator: torch.Generator, num_tokens: int, with_moe: bool) -> torch.Tensor:
        from megatron.core.tensor_parallel import checkpoint
        from torch.utils.checkpoint import checkpoint as not_reentrant

        hidden = torch.randn(num_tokens, 1, HIDDEN, generator=generator).to("cuda")
        hidden.requires_grad_()
        for case, layer in zip(self.cases, self.layers, strict=True):
            if not with_moe:
                continue
            force(layer.router, forced_routing(case, num_tokens, generator))

            def run(rows: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                return rows + layer(rows)[0]

            way = self.training.recompute if torch.is_grad_enabled() else ""
            if way == "full":
                hidden = checkpoint(run, False, hidden)
            elif way == "not reentrant":
                hidden = not_reentrant(run, hidden, use_reentrant=False)
            else:
                hidden = run(hidden)
        return hidden.square().mean()

    def step(self, number: int) -> list[float]:
        """A step; the losses of its micro-batches and of the evaluation after it."""
        training, replica, losses = self.training, self.replica, []
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        num_tokens = self.case.num_tokens
        if training.tokens:
            num_tokens = training.tokens[(dist.get_rank() + number) % len(training.tokens)]
        with_moe = number not in training.absent[replica]
        for _ in range(training.micro_batches[replica]):
            loss = self.forward(generator, num_tokens, with_moe)
            loss.backward()
            losses.append(loss.item())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        evaluates = training.evaluates and (number + 1) % training.evaluates == 0
        if evaluates and replica in training.evaluating:
            for layer in self.layers:
                layer.eval()
            with torch.no_grad():
                losses.append(self.forward(generator, 4 * num_tokens, True).item())
            for layer in self.layers:
                layer.train()
        return losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank has seen of a training."""

    losses: list[list[float]]
    exchanges: list[Exchange]
    said: list[str]


def train(case: Case, dispatcher: str, training: Training) -> Trained:
    """Train; nothing is averaged over replicas, so that none waits for another."""

    first_rank._printed.clear()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model = Model(case, dispatcher, training)
        losses = [model.step(number) for number in range(training.num_steps)]
    return Trained(
        losses=losses, exchanges=model.exchanges, said=said.getvalue().strip().splitlines()
    )


@contextlib.contextmanager
def clock_of(us_of_choice: dict[str, float], model: Model) -> Iterator[None]:
    """Let an iteration take what its choice takes, and no time otherwise."""
    from monta_megatron.integration import auto

    def take(*_: Any) -> list[float]:
        return [us_of_choice.get(model.exchanges[-1][2], 1000.0)]

    with (
        mock.patch.object(auto.IterationClock, "take", take),
        mock.patch.object(auto, "us_of", sum),
    ):
        yield


def tune(
    case: Case, training: Training, us_of_choice: dict[str, float]
) -> tuple[list[str], list[str], list[int]]:
    """A training in which each choice takes a given time.

    Returns:
        what ran in each step; what a rank said; the first step of each window.
    """

    first_rank._printed.clear()
    windows = []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model = Model(case, "monta", training)
        with clock_of(us_of_choice, model):
            for number in range(training.num_steps):
                model.step(number)
                windows.append(model.choosers[0].tuner.window.first)
    ran = dict[int, str]()
    for _, step, name, is_training in model.exchanges:
        if is_training:
            assert ran.setdefault(step, name) == name
    return list(ran.values()), said.getvalue().splitlines(), sorted(set(windows))


def step_alone(case: Case, rank: int) -> None:
    """One rank's optimizer makes a step that those of the others do not."""
    model = Model(case, "monta", Training(num_steps=3))
    model.step(0)
    if dist.get_rank() == rank:
        model.optimizers[0].step()
    model.step(1)


def compare_changing_tokens(case: Case, tokens: list[int]) -> list[tuple[str, str]]:
    """Steps of so many tokens a rank, against stock; what ran, and where counts were waited for."""
    training = Training(num_steps=len(tokens))
    models = []
    for dispatcher in ("alltoall", "monta"):
        models.append(Model(case, dispatcher, training))
    seen = []
    for number, num_tokens in enumerate(tokens):
        for model in models:
            model.training = dataclasses.replace(training, tokens=(num_tokens,))
        stock, ours = (model.step(number) for model in models)
        assert ours == stock
        dispatcher = models[1].layers[0].token_dispatcher
        seen.append((dispatcher.choice.chain, dispatcher.cuda_sync_point))
    return seen


def replay_between_steps(case: Case, num_steps: int) -> list[str]:
    """Steps of a layer whose preprocess is replayed: its Python ran once, when captured.

    A replay brings back what was counted, by the attributes that Megatron lists.

    Returns:
        what ran in each step.
    """
    from monta_megatron.integration import auto

    auto._shared.clear()
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
    for _ in range(num_steps):
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
        seen.append(dispatcher.choice.name)
    return seen


def two_models(case: Case, num_steps: int) -> list[Exchange]:
    """A student and a teacher that only evaluates, of one shape on one exchange."""
    training = Training(num_steps=num_steps)
    student = Model(case, "monta", training)
    teacher = Model(case, "monta", training, is_first=False)
    assert teacher.choosers[0] is student.choosers[0]
    for layer in teacher.layers:
        layer.eval()
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            teacher.forward(generator, case.num_tokens, True)
        student.step(number)
    return teacher.exchanges + student.exchanges
