"""Assumptions of an estimate: constants with value, unit and source, in one file of configs/.

A constant may have several values: one for all, and others for a GPU or a cluster whose name holds
a text. The last that fits is taken; `--set name=value` replaces them all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.rules import NonNegativeFloat, Text, require
from monta_megatron.common.text import one_of, same_name

FILE = presets.FOLDER / "estimate" / "assumptions.yaml"
SET = "--set"
SHARES = ("_share", "_efficiency")
# In place of a GPU's name.
CPU_RANKS = "CPU ranks"


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """One constant.

    Attributes:
        name: as `--set` names it; the unit is part of it. Those that end in `_share` or
            `_efficiency` are at most 1.
        value: the number.
        source: where it comes from; of a fitted one, what it was fitted on.
        fitted: whether it was fitted on the published rows that judge nothing.
        where: a text that the name of the GPU or of the cluster has to hold; None for all.
    """

    name: Text
    value: NonNegativeFloat
    source: Text
    fitted: bool = False
    where: Text | None = None

    def __post_init__(self) -> None:
        if self.name.endswith(SHARES):
            require(0 < self.value <= 1, "value", self.value, "be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class AssumptionFile:
    """All of them.

    Attributes:
        assumptions: in the order in which they are printed.
    """

    assumptions: tuple[Assumption, ...]


@dataclass(frozen=True)
class Assumptions:
    """The constants for one GPU on one cluster.

    Attributes:
        of: name -> the constant that applies.
    """

    of: Mapping[str, Assumption]

    def __getitem__(self, name: str) -> float:
        return self.of[name].value

    @cached_property
    def peak_flops_per_us(self) -> float:
        """FLOPs that the GPU's tensor cores make in a microsecond, at most."""
        return self["peak_tflops"] * 1e6


@cache
def read_assumptions() -> tuple[Assumption, ...]:
    """All constants of the file."""
    return strict_yaml.load(AssumptionFile, FILE).assumptions


def gpu_names() -> tuple[str, ...]:
    """The GPUs whose peak is known."""
    peaks = (entry.where or "" for entry in read_assumptions() if entry.name == "peak_tflops")
    return tuple(name for name in peaks if name != CPU_RANKS)


def named_gpu(text: str) -> str | None:
    """The known GPU that a text names; of several the longest: GB200 is no B200."""
    return max((name for name in gpu_names() if name in text), key=len, default=None)


def gpu_of(cluster: str, given: str | None) -> str:
    """The GPU of a cluster: the given one, or the one that the cluster's name holds.

    Args:
        cluster: name of the cluster.
        given: a GPU's name; None to look.

    Raises:
        ValueError: it is not known.
    """
    known = gpu_names()
    if given is not None:
        name = same_name(given, known)
        if name is None:
            raise ValueError(f"--gpu: got {given}, must be {one_of(given, known)}")
        return name
    if (name := named_gpu(cluster)) is not None:
        return name
    raise ValueError(
        f"--gpu: not given, must be where the cluster's name ({cluster}) holds none of "
        f"{', '.join(known)}"
    )


def assumptions_of(
    gpu: str,
    cluster: str,
    changes: Mapping[str, float] | None = None,
    entries: Sequence[Assumption] | None = None,
) -> Assumptions:
    """The constants that apply.

    Args:
        gpu: its name.
        cluster: name of the cluster.
        changes: name -> value, given by the user.
        entries: all constants; None for those of the file.

    Raises:
        ValueError: a name is not known, or a value breaks its rule.
    """
    of: dict[str, Assumption] = {}
    for entry in read_assumptions() if entries is None else entries:
        # The given GPU's own constant stays, whatever GPU the cluster's name holds.
        is_settled = entry.name in of and of[entry.name].where == gpu
        fits = entry.where is None or entry.where in cluster
        if entry.where == gpu or (fits and not is_settled):
            of[entry.name] = entry
    for name, value in (changes or {}).items():
        if name not in of:
            raise ValueError(f"{SET}: got {name}, must be {one_of(name, of)}")
        try:
            of[name] = replace(of[name], value=value, source=f"{SET} {name}", fitted=False)
        except ValueError as error:
            raise ValueError(f"{SET} {name}: {error}") from None
    return Assumptions(of)


def change_of(text: str) -> tuple[str, float]:
    """Read "name=value".

    Raises:
        ValueError: it is none.
    """
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number) or number < 0:
        raise ValueError(f"got {text!r}, must be NAME=VALUE with a number >= 0")
    return name, number
