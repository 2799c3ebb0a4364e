"""Tables of results for a terminal."""

from collections.abc import Sequence
from statistics import median


def aligned_table(lines: Sequence[Sequence[str]], aligned: Sequence[str]) -> str:
    """Align the cells of each column; `aligned` has `<` or `>` for each of them."""
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            f"{cell:{a}{w}}" for cell, a, w in zip(line, aligned, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_footer(work_us: Sequence[float], wrong: Sequence[str], seconds: float) -> None:
    """Print how steady the machine was, and all errors."""
    if work := sorted(work_us):
        low, middle, high = f"{work[0]:.0f}", f"{median(work):.0f}", f"{work[-1]:.0f}"
        print(f"\nthe same plain work took {low} to {high} µs, median {middle}")
    for what in sorted(set(wrong)):
        print(f"wrong: {what} ({wrong.count(what)} times)")
    print(f"wrong: {len(wrong)}; {seconds:.0f} s")
