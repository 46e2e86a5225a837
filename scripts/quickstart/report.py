"""What the quickstart shows: progress while it trains, the table at its end. Fits 80 columns."""

from collections.abc import Callable, Sequence

# Called with the number of finished iterations and the latest loss.
ShowProgress = Callable[[int, float], None]

NUM_TABLE_ROWS = 10
BAR_WIDTH = 30


def progress(name: str, iterations: int) -> ShowProgress:
    """A line every few iterations."""
    step = max(1, iterations // NUM_TABLE_ROWS)
    shown = 0
    print(f"{name:<8}  starting {iterations} iterations", flush=True)

    def show(finished: int, loss: float) -> None:
        nonlocal shown
        if finished // step > shown // step or finished == iterations:
            print(f"{name:<8}  iteration {finished}/{iterations}  loss {loss:.4f}", flush=True)
        shown = finished

    return show


def loss_table(monta: Sequence[float], alltoall: Sequence[float]) -> str:
    """Both loss curves, every few iterations, with a bar for the eye."""
    step = max(1, len(monta) // NUM_TABLE_ROWS)
    rows = sorted({0, *range(step - 1, len(monta), step), len(monta) - 1})
    top = max(monta[row] for row in rows)
    lines = [f"{'iteration':>9}  {'monta':>9}  {'alltoall':>9}  {'difference':>10}"]
    for row in rows:
        # Loss minus loss, not rounded: 0 is printed only where the two are the same number.
        difference = f"{monta[row] - alltoall[row]:.3g}"
        bar = "#" * round(BAR_WIDTH * monta[row] / top)
        lines.append(
            f"{row + 1:>9}  {monta[row]:>9.6f}  {alltoall[row]:>9.6f}  {difference:>10}  {bar}"
        )
    return "\n".join(lines)


def largest_difference(losses: Sequence[float], stock: Sequence[float]) -> float:
    """Largest relative difference of a loss from stock's of the same iteration."""
    return max(abs(own / other - 1) for own, other in zip(losses, stock, strict=False))
