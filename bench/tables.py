"""A table of results, as a person reads it in a terminal."""

from collections.abc import Sequence


def aligned_table(lines: Sequence[Sequence[str]], aligned: Sequence[str]) -> str:
    """The lines with their cells under each other; `aligned` is `<` or `>` for each column."""
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            f"{cell:{a}{w}}" for cell, a, w in zip(line, aligned, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def shown_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
