"""Requests to have other agents work: how they begin, and what each of the agents is to do.

Pure. What an agent is told is not understood here: it has the same model, which reads it again.
"""

import re
from collections.abc import Iterator
from itertools import islice

TASKS_MAX = 6  # In one prompt.

_AGENT = r"(?:sub-?\s?)?agent"
_GIVE = r"(?:ask|tell|let|have|start|use|get)"
_NUMBER = r"(?:two|three|four|five|six|several|\d)"
_TO = r"(?::|,|\s+(?:to|do)\b:?)?"
_OTHER = r"(?:another|one\s+more|a\s+(?:second|third|fourth|fifth|sixth)|the\s+(?:other|next))"
_TASK = (  # What an agent that is only called "another" does; else another file would be one.
    "list|ls|show|display|open|read|cat|view|print|search|grep|look|find|locate|count|run|execute"
    "|replace|change|create|write|fetch|download|delegate|ask|have|let|tell"
)

DELEGATE = re.compile(
    rf"(?:delegate\b(?:\s+to\s+(?:a|an|one|another)\s+{_AGENT})?"
    rf"|{_GIVE}\s+(?:(?:a|an|one|another|the)\s+{_AGENT}|(?P<many>{_NUMBER}\s+{_AGENT}s)))"
    rf"{_TO}\s+(?P<tasks>.+)",
    re.IGNORECASE | re.DOTALL,
)
# Where the next agent's begins. Spaces are bounded, or a long row of them would be tried at each.
_NEXT = re.compile(
    rf"(?:[,;.]\s{{1,9}}(?:and\s{{1,9}})?|\s{{1,9}}and\s{{1,9}})(?:{_GIVE}\s+)?{_OTHER}"
    rf"(?:\s+(?:one|{_AGENT}){_TO}\s+|{_TO}\s+(?=(?:{_TASK})\b))",
    re.IGNORECASE,
)
_TO_AGENT = re.compile(rf"\s+to\s+(?:a|an|one|another)\s+{_AGENT}$", re.IGNORECASE)
_BULLET = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+", re.MULTILINE)
_QUOTED = re.compile(r"[\ue000-\uf8ff]")  # As `offline_clauses.py` marks it.
_BETWEEN = re.compile(rf"(?:[,;.]\s{{1,9}}|\s{{1,9}}and\s{{1,9}})(?=(?:{_TASK})\b)", re.IGNORECASE)


def tasks_of(text: str) -> tuple[str, ...]:
    """What each agent is told, quoted text still marked; nothing if none is wanted."""
    match = DELEGATE.fullmatch(text)
    if match is None:
        return ()
    tasks = match["tasks"]
    pieces = _of_many(tasks) if match["many"] else _NEXT.split(tasks)
    stripped = (_TO_AGENT.sub("", piece.strip()).strip(" \t\n,;") for piece in pieces)
    return tuple(islice(filter(None, stripped), TASKS_MAX))


def _of_many(tasks: str) -> Iterator[str]:
    """The tasks of agents that are given by their number: a list, quoted texts, or clauses."""
    if _BULLET.match(tasks):
        yield from _BULLET.split(tasks)
    elif _QUOTED.match(tasks):
        yield from _QUOTED.findall(tasks)
    else:
        yield from _BETWEEN.split(tasks)
