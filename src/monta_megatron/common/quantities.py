"""Counts, sizes and times as text, and GB as bytes: 1 GB is 1e9 of them."""

GB_BYTES = 1e9


def bytes_of_gb(number: float | None) -> float | None:
    """GB as bytes; None, for what is not known or not limited, stays None."""
    return None if number is None else number * GB_BYTES


def counted(number: int, noun: str) -> str:
    """1, "chunk" -> "1 chunk"; 4096, "token" -> "4,096 tokens"; nouns with a plural in s."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size_text(num_bytes: float | None) -> str:
    """Bytes in three digits and a unit; "-" for none."""
    if not num_bytes:
        return "-"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return (
                f"{num_bytes / size:.3g} {unit}"
                if num_bytes < 999.5 * size
                else f"{num_bytes / size:.0f} {unit}"
            )
    return f"{num_bytes:.0f} B"


def gb_text(num_bytes: float) -> str:
    """Bytes in GB, in three digits."""
    return f"{num_bytes / GB_BYTES:.3g} GB"


def time_text(time_us: float, beside_us: float = 0.0) -> str:
    """A time in three digits and us, ms or s: the unit of the larger of it and `beside_us`."""
    largest_us = max(time_us, beside_us)
    unit, size = ("us", 1.0) if largest_us < 999.5 else ("ms", 1e3)
    if largest_us >= 999.5e3:
        unit, size = "s", 1e6
    time = time_us / size
    return f"{time:.3g} {unit}" if time < 99.5 else f"{time:,.0f} {unit}"
