"""Training steps while candidates are tried.

A rank notes what every exchange of its layers ran in, so that ranks can be compared.
"""

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist
from layers import Case, build_layer, force, routing_of_rank
from torch.utils.checkpoint import checkpoint

NUM_TOKENS = 24
# A pause for rewards.
PAUSE_NS = 400_000_000
# Number of a step, choice and whether the layer trained, of one exchange.
Exchange = tuple[int, str, bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How two layers of one shape are trained, each with an optimizer of its own.

    Every `evaluates`-th step is followed by an evaluation of more tokens, by the replicas
    `evaluating`. Replicas are the exchanges: replica r leaves the MoE layers out in the steps
    `absent[r]`, and has `micro_batches[r]`.

    Every `log_probs`-th step comes behind two passes without gradients in training mode, of other
    tokens, and a pause. Where `is_drawn`, the numbers of micro-batches and of tokens are drawn anew
    in each step. `recompute` is "reentrant" or "not reentrant" where backward runs layers again.
    """

    micro_batches: tuple[int, ...] = (1, 1)
    evaluates: int = 0
    evaluating: tuple[int, ...] = (0, 1)
    absent: tuple[tuple[int, ...], ...] = ((), ())
    log_probs: int = 0
    is_drawn: bool = False
    recompute: str = ""


class Clock:
    """Stands in for `time` where iterations are timed; what takes time is added to it.

    Attributes:
        now_ns: the time.
    """

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        self.now_ns += 10_000
        return self.now_ns


class Model:
    """Layers with our dispatcher, which go with the planner's shared choices.

    Attributes:
        layers: the layers.
        optimizers: of each layer.
        exchanges: what each exchange of theirs ran in.
        clock: the time of iterations, where it is not the real one.
    """

    def __init__(self, case: Case, training: Training, is_first: bool = True) -> None:
        from monta_megatron.integration import auto

        if is_first:
            auto._shared.clear()
        self.case, self.training = case, training
        self.layers = [build_layer(case).train() for _ in range(2)]
        self.optimizers = [
            torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9) for layer in self.layers
        ]
        self.exchanges: list[Exchange] = []
        self.clock = Clock()

    @property
    def chooser(self) -> Any:
        """Of all layers, where they share one."""
        return self.layers[0].token_dispatcher.chooser

    def forward(self, generator: torch.Generator, num_tokens: int) -> torch.Tensor:
        hidden = torch.randn(num_tokens, 1, self.case.hidden, generator=generator).to("cuda")
        for layer in self.layers:
            force(layer.router, routing_of_rank(self.case, num_tokens, generator))
            if self.training.recompute and torch.is_grad_enabled():
                is_reentrant = self.training.recompute == "reentrant"
                # A reentrant checkpoint needs an input with a gradient.
                hidden = hidden.requires_grad_() if hidden.is_leaf else hidden
                output, _ = checkpoint(layer, hidden, use_reentrant=is_reentrant)
            else:
                output, _ = layer(hidden)
            hidden = hidden + output
            self.clock.now_ns += (num_tokens + 16) * self.ns_per_token(layer.token_dispatcher)
            dispatcher = layer.token_dispatcher
            tuner = getattr(dispatcher.chooser, "tuner", None)
            step = 0 if tuner is None else tuner.step
            self.exchanges.append((step, dispatcher.choice.name, layer.training))
        return hidden.square().mean()

    def step(self, number: int) -> list[float]:
        """A step; the losses of its micro-batches and of the evaluation after it."""
        training, losses = self.training, []
        replica = dist.get_rank() // self.case.size % 2
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        if training.log_probs and number % training.log_probs == 0:
            with torch.no_grad():
                for _ in range(2):
                    losses.append(self.forward(generator, 3 * NUM_TOKENS).item())
            self.clock.now_ns += PAUSE_NS
        num_tokens = [NUM_TOKENS] * training.micro_batches[replica]
        if training.is_drawn:
            draw = random.Random(number)
            num_tokens = [draw.randint(12, 36) for _ in range(draw.randint(1, 4))]
        if number not in training.absent[replica]:
            for tokens in num_tokens:
                loss = self.forward(generator, tokens)
                loss.backward()
                losses.append(loss.item())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        evaluates = training.evaluates and (number + 1) % training.evaluates == 0
        if evaluates and replica in training.evaluating:
            losses.append(self.evaluate(generator))
        return losses

    def ns_per_token(self, dispatcher: Any) -> int:
        """Time of what runs, for the clock: each candidate is slower than the one before."""
        window = getattr(getattr(dispatcher.chooser, "tuner", None), "window", None)
        names = [choice.name for choice in window.candidates] if window else []
        name = dispatcher.choice.name
        return 100_000 + 20_000 * (names.index(name) if name in names else 0)

    def evaluate(self, generator: torch.Generator) -> float:
        """The loss without training."""
        for layer in self.layers:
            layer.eval()
        with torch.no_grad():
            loss = self.forward(generator, 4 * NUM_TOKENS).item()
        for layer in self.layers:
            layer.train()
        return loss

    def train(self, num_steps: int) -> list[list[float]]:
        """The losses; nothing is averaged over replicas, so that none waits for another."""
        return [self.step(number) for number in range(num_steps)]
