"""A minimal Megatron pretraining script: a GPT-MoE under Megatron's own training loop.

Nothing here names a token dispatcher: `--moe-token-dispatcher-type` decides, as in any Megatron
script. What is added is a record of the run, one JSON document per line: the unrounded loss of
every iteration, then what dispatched the tokens and the bytes it sent. On an emulated cluster the
bytes that its network has carried are noted too.
"""

import json
import os
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from monta_megatron.emulation.cluster import EmulatedCluster

Batch = dict[str, torch.Tensor]


class Record:
    """The run's record: every rank calls its methods, one rank writes each line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._iteration = 0
        self._micro_batches: list[torch.Tensor] = []
        self._dispatchers: list[Any] = []
        self._nic_bytes_before = _sent_by_this_node()

    def find_dispatchers(self, model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Keep the token dispatchers of the model that Megatron has built."""
        self._dispatchers = [
            module.token_dispatcher
            for chunk in model
            for module in chunk.modules()
            if isinstance(module, MoELayer)
        ]
        return model

    def loss(self, loss_sum: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Note a micro-batch; after an iteration's last one, its mean loss per token.

        Only the last pipeline stage has losses.
        """
        self._micro_batches.append(torch.stack([loss_sum.detach(), num_tokens.float()]))
        if len(self._micro_batches) < get_num_microbatches():
            return
        totals = torch.stack(self._micro_batches).sum(dim=0)
        self._micro_batches = []
        self._iteration += 1
        data_parallel = mpu.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(totals, group=data_parallel)
        if data_parallel.rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0:
            self._write({"iteration": self._iteration, "loss": totals[0].item() / totals[1].item()})

    def dispatch(self) -> None:
        """Note which dispatchers ran, and the bytes that all ranks sent."""
        names = {type(dispatcher).__name__ for dispatcher in self._dispatchers}
        sent = Counter(network=_sent_by_this_node() - self._nic_bytes_before)
        for dispatcher in self._dispatchers:
            if hasattr(dispatcher, "monitor"):  # Stock's dispatchers do not count.
                sent.update(dispatcher.monitor.bytes_by_resource())
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, (names, sent))
        if dist.get_rank() == 0:
            for other_names, other_sent in by_rank[1:]:
                names |= other_names
                sent += other_sent
            self._write({"dispatcher": sorted(names), "bytes": sent})

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _sent_by_this_node() -> int:
    """Bytes that the NICs of an emulated node have sent; the first rank on it counts them."""
    cluster = EmulatedCluster.from_environment()
    return 0 if cluster is None or os.environ["LOCAL_RANK"] != "0" else cluster.sent_bytes()


def loss_func(
    record: Record, loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Sum the losses of a micro-batch: [B, S] -> scalar, number of tokens, Megatron's report."""
    mask = loss_mask.view(-1).float()
    loss_sum = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    if torch.is_grad_enabled():  # Not an evaluation.
        record.loss(loss_sum, num_tokens)
    report = torch.stack([loss_sum.detach(), num_tokens.float()])
    return loss_sum, num_tokens, {"lm loss": report}


def forward_step(
    record: Record, data_iterator: Iterator[Batch], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run the model on one micro-batch, or plan it for the schedule that overlaps two of them."""
    batch = {name: tensor.cuda() for name, tensor in next(data_iterator).items()}
    run = model.build_schedule_plan if return_schedule_plan else model
    losses = run(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return losses, partial(loss_func, record, batch["loss_mask"])


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test data from `--data-path` or `--mock-data`, by `--seed`.

    Every virtual pipeline stage reads the same.
    """
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if args.mock_data else (args.data_path, None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, lambda: True, config).build()


# Every tensor-parallel rank reads the same samples itself, so that no batch has to be broadcast.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _add_arguments(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--record", type=Path, required=True, help="JSON lines of this run.")
    return parser


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=_add_arguments)
    record = Record(args.record)
    model_config = gpt_config_from_args(args)
    model_config.post_wrap_hooks.append(record.find_dispatchers)
    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        datasets_provider,
        ModelType.encoder_or_decoder,
        partial(forward_step, record),
    )
    record.dispatch()


if __name__ == "__main__":
    main()
