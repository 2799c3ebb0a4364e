"""Who stands below whom, as a list is printed."""

from collections.abc import Iterator, Mapping


def in_tree_order(parents: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Each id below the one above it, with how deep it stands, in the order given.

    Whose parent is not there stands at the top. Everybody comes once.
    """
    below: dict[str, list[str]] = {}
    for one, parent in parents.items():
        below.setdefault(parent if parent in parents else "", []).append(one)
    shown: set[str] = set()
    for start in (*below.get("", ()), *parents):  # Those that lead in a circle come last.
        ways = [(0, start)]
        while ways:
            depth, one = ways.pop()
            if one not in shown:
                shown.add(one)
                yield depth, one
                ways += [(depth + 1, child) for child in reversed(below.get(one, ()))]
