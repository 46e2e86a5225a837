"""Counts and sizes as text."""


def counted(number: int, noun: str) -> str:
    """1, "chunk" -> "1 chunk"; 4096, "token" -> "4,096 tokens"; nouns with a plural in s."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size_text(num_bytes: float | None) -> str:
    """Bytes in three digits and a unit (1 GB is 1e9 bytes); "-" for none."""
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
