"""scripts/page_numbers.py: pages show what commands print, and what it writes into them."""

import sys
from pathlib import Path

import pytest
from pages import PAGES, name_of

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import page_numbers


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_is_not_stale(page: Path) -> None:
    is_stale = page.read_text(encoding="utf-8") != page_numbers.written(page)
    assert not is_stale, f"{name_of(page)} is stale: run scripts/page_numbers.py"


OUTPUT = """\
choice    hierarchical_alltoall in 4 chunks: 1,990 us, dispatch +
          combine
benefit   1.31x stock alltoall
rates     network 45 GB/s

chain     us
b         1
c         2
"""


@pytest.mark.parametrize(
    ("block", "renewed"),
    [
        ("an old output\n", OUTPUT),
        (
            "...\nbenefit 1.27x\n...\nchain us\na 3\n...\n",
            "...\nbenefit   1.31x stock alltoall\n...\nchain     us\nb         1\n...\n",
        ),
        (
            "choice old\n...\n",
            "choice    hierarchical_alltoall in 4 chunks: 1,990 us, dispatch +\n"
            "          combine\n...\n",
        ),
        ("...\nc 3\n", "...\nc         2\n"),
    ],
)
def test_blocks_are_renewed(block: str, renewed: str) -> None:
    assert page_numbers.shown(block, OUTPUT) == renewed


def test_a_block_of_what_is_not_printed_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with 'layout'"):
        page_numbers.shown("...\nlayout    EP 8\n...\n", OUTPUT)


TEXT = "The exchange takes 2,080\nus (`alltoall_dedup`, 1.27x), 47 elsewhere."


def test_numbers_of_a_passage_are_renewed() -> None:
    passage = "takes {us} us (`{chain}`, {speedup})"
    found = {"us": "1,990", "chain": "allgather", "speedup": "1.3x"}
    renewed = page_numbers.with_numbers(TEXT, passage, found)
    assert renewed == "The exchange takes 1,990\nus (`allgather`, 1.3x), 47 elsewhere."


@pytest.mark.parametrize("passage", ["takes {us} ms", "{any}"])
def test_passages_stand_in_one_place(passage: str) -> None:
    with pytest.raises(ValueError, match="in place of one"):
        page_numbers.with_numbers(TEXT, passage, {})
