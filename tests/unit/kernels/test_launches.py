"""A launch that Triton has bound before is given what Triton itself would give it."""

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")

from compiled_kernels import no_driver
from triton.compiler.compiler import LazyDict

from monta_megatron.chains.stages import ExpertRange
from monta_megatron.exchange.copies import Copies
from monta_megatron.exchange.kernels import tiles
from monta_megatron.exchange.kernels.to_experts import to_experts
from monta_megatron.exchange.payload import Columns

HIDDEN = 32
PARTS = ExpertRange(first=0, size=1, num_parts=4)


@pytest.mark.skipif(not tiles.LAUNCHES_VARIANTS, reason="this Triton binds every launch")
def test_a_variant_is_launched_as_its_kernel_is() -> None:
    launched: list[tuple[Any, ...]] = []
    variants = {key: (*places, {}) for key, (*places, _) in tiles._VARIANTS.items()}
    memory = torch.zeros(8 * HIDDEN, dtype=torch.bfloat16)
    into = torch.zeros(9, HIDDEN, dtype=torch.bfloat16)

    def launch(columns: Columns) -> int:
        """Returns how many variants there are then."""
        to_experts(columns, copies, Columns(rows=into))
        return sum(len(made) for *_, made in variants.values())

    with (
        no_driver(lambda *arguments: launched.append(arguments)),
        mock.patch.object(tiles, "_VARIANTS", variants),
    ):
        copies = Copies.empty(6, 9, PARTS, memory.device)
        columns = Columns(rows=memory[: 6 * HIDDEN].view(6, HIDDEN))
        assert launch(columns) == launch(columns) == 1
        # Another number of copies is no other variant; rows that begin elsewhere are one.
        copies = Copies.empty(6, 5, PARTS, memory.device)
        assert launch(columns) == 1
        assert launch(Columns(rows=memory[1 : 6 * HIDDEN + 1].view(6, HIDDEN))) == 2
    by_triton, by_variant = launched[:2]
    for expected, actual in zip(by_triton, by_variant, strict=True):
        if isinstance(expected, torch.Tensor):
            assert actual is expected
        elif not isinstance(expected, LazyDict):
            # That describes a launch to profilers, and is made for each.
            assert actual == expected
