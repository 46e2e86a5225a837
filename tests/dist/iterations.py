"""Training steps while candidates are tried.

A rank notes what every exchange of its layers ran in, so that ranks can be compared.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from layers import Case, build_layer, force, routing_of_rank

# Shape of a layer, number of a step, choice and whether the layer trained, of one exchange.
Exchange = tuple[int, int, str, bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How layers are trained: for a window of 9 steps and some more, unless more are given.

    Two layers, each with an optimizer of its own; `shapes` of them: 1 or 2. `recompute` is "full",
    "selective", "not reentrant" or "". Every `evaluates`-th step is followed by an evaluation of
    more tokens, by the replicas `evaluating`. Replicas are the exchanges: replica r leaves the MoE
    layers out in the steps `absent[r]`, and has `micro_batches[r]`. Rank r of the step s has
    `tokens[(r + s) % len(tokens)]` tokens.
    """

    num_steps: int = 13
    micro_batches: tuple[int, ...] = (1, 1)
    shapes: int = 1
    recompute: str = ""
    evaluates: int = 0
    evaluating: tuple[int, ...] = (0, 1)
    absent: tuple[tuple[int, ...], ...] = ((), ())
    tokens: tuple[int, ...] = (24,)


class Model:
    """Layers of one or two shapes with our dispatcher, which go with the planner's shared choices.

    Attributes:
        layers: the layers.
        optimizers: of each layer.
        exchanges: what each exchange of theirs ran in.
    """

    def __init__(self, case: Case, training: Training, is_first: bool = True) -> None:
        from monta_megatron.integration import auto

        if is_first:
            auto._shared.clear()
        if training.recompute == "selective":
            config = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
            case = dataclasses.replace(case, config={**case.config, **config})
        larger = dataclasses.replace(
            case, num_local_experts=training.shapes * case.num_local_experts
        )
        self.cases, self.training = [case, larger], training
        self.replica = dist.get_rank() // (case.ep * case.etp) % 2
        self.layers = [build_layer(each).train() for each in self.cases]
        self.optimizers = [
            torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9) for layer in self.layers
        ]
        self.exchanges: list[Exchange] = []
        for number, layer in enumerate(self.layers):
            self._note(number % training.shapes, layer.token_dispatcher)

    @property
    def chooser(self) -> Any:
        """Of the first layer."""
        return self.layers[0].token_dispatcher.chooser

    def _note(self, shape: int, dispatcher: Any) -> None:
        bound = dispatcher._bound

        def noting(batch: Any) -> Any:
            tuner = getattr(dispatcher.chooser, "tuner", None)
            step = 0 if tuner is None else tuner.step
            batch = bound(batch)
            is_training = dispatcher.moe_layer().training
            self.exchanges.append((shape, step, batch.choice.name, is_training))
            return batch

        dispatcher._bound = noting

    def forward(
        self, generator: torch.Generator, num_tokens: int, with_moe: bool = True
    ) -> torch.Tensor:
        from megatron.core.tensor_parallel import checkpoint
        from torch.utils.checkpoint import checkpoint as not_reentrant

        hidden = torch.randn(num_tokens, 1, self.cases[0].hidden, generator=generator).to("cuda")
        hidden.requires_grad_()
        for case, layer in zip(self.cases, self.layers, strict=True):
            if not with_moe:
                continue
            force(layer.router, routing_of_rank(case, num_tokens, generator))

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
                losses.append(self.forward(generator, 4 * num_tokens).item())
            for layer in self.layers:
                layer.train()
        return losses

    def train(self) -> list[list[float]]:
        """The losses; nothing is averaged over replicas, so that none waits for another."""
        return [self.step(number) for number in range(self.training.num_steps)]
