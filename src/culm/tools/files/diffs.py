"""The difference of two texts, line by line, in bounded time.

Pure. The common beginning and end are removed first, in blocks; the shortest edit script of the
rest is computed with a bound on the steps. Beyond that bound the whole middle counts as replaced:
such a difference is correct but not minimal, and nobody reads it line by line.
"""

from collections.abc import Sequence

from msgspec import Struct

CONTEXT = 3  # Lines around a change, as in diff.
BLOCK_CHARS = 64 << 10
STEPS_MAX = 50_000  # About 20 ms.
EDITS_MAX = 300  # The stored paths grow with its square.
DIFF_CHARS_MAX = 128 << 10
CONTENT_CHARS_MAX = 256 << 10
EXCERPT_CONTEXT = 50


class DiffBlock(Struct, frozen=True):
    """Lines `a[a0:a1]` became `b[b0:b1]`; numbered from 0."""

    a0: int
    a1: int
    b0: int
    b1: int


class TextDifference(Struct, frozen=True):
    """The changes of a text. The lines are those around the changes; `skipped` precede them."""

    skipped: int
    before: Sequence[str]
    after: Sequence[str]
    blocks: Sequence[DiffBlock]

    @property
    def additions(self) -> int:
        return sum(block.b1 - block.b0 for block in self.blocks)

    @property
    def removals(self) -> int:
        return sum(block.a1 - block.a0 for block in self.blocks)


def difference(before: str, after: str) -> TextDifference:
    """Compute the difference of two texts."""
    start, ends = _changed_span(before, after, CONTEXT)
    a, b = lines_of(before[start : ends[0]]), lines_of(after[start : ends[1]])
    return TextDifference(before.count("\n", 0, start), a, b, _blocks(a, b))


def unified(found: TextDifference, path: str) -> str:
    """Format the difference as `diff -u` does; a very long one is cut at a line."""
    lines = [f"--- a/{path.lstrip('/')}\n", f"+++ b/{path.lstrip('/')}\n"]
    for group in _grouped(found.blocks):
        first, last = group[0], group[-1]
        lead = min(CONTEXT, first.a0)
        trail = min(CONTEXT, len(found.before) - last.a1)
        a0, b0 = first.a0 - lead, first.b0 - lead
        spans = (_span(found.skipped + a0, last.a1 + trail - a0),
                 _span(found.skipped + b0, last.b1 + trail - b0))  # fmt: skip
        lines.append(f"@@ -{spans[0]} +{spans[1]} @@\n")
        at = a0
        for block in group:
            lines += [f" {line}" for line in found.before[at : block.a0]]
            lines += [f"-{line}" for line in found.before[block.a0 : block.a1]]
            lines += [f"+{line}" for line in found.after[block.b0 : block.b1]]
            at = block.a1
        lines += [f" {line}" for line in found.before[at : at + trail]]
    return _joined(lines)


def _span(start: int, count: int) -> str:
    return f"{start + 1 if count else start},{count}"


def _joined(lines: Sequence[str]) -> str:
    kept: list[str] = []
    size = 0
    for line in lines:
        size += len(line)
        if size > DIFF_CHARS_MAX:
            return "".join((*kept, "(the rest of the difference is left out)\n"))
        kept.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(kept) if len(lines) > 2 else ""


def _grouped(blocks: Sequence[DiffBlock]) -> list[list[DiffBlock]]:
    """Group the blocks whose contexts touch."""
    groups: list[list[DiffBlock]] = []
    for block in blocks:
        if groups and block.a0 - groups[-1][-1].a1 <= 2 * CONTEXT:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def excerpts(before: str, after: str) -> tuple[str, str]:
    """Return both texts for a client that compares them: whole, or only the changed part.

    The same note in both marks the omitted lines, so that comparing them finds the same changes.
    """
    if len(before) <= CONTENT_CHARS_MAX and len(after) <= CONTENT_CHARS_MAX:
        return before, after
    start, (end, new_end) = _changed_span(before, after, EXCERPT_CONTEXT)
    head = f"… (lines left out: {before.count(chr(10), 0, start)})\n" if start else ""
    tail = f"… (lines left out: {before.count(chr(10), end)})\n" if end < len(before) else ""
    return (
        f"{head}{_cut(before[start:end])}{tail}",
        f"{head}{_cut(after[start:new_end])}{tail}",
    )


def _cut(text: str) -> str:
    return text if len(text) <= CONTENT_CHARS_MAX else f"{text[:CONTENT_CHARS_MAX]}… (cut)\n"


def lines_of(text: str) -> list[str]:
    """Split into lines with their ends. Only a line feed ends a line, as in every tool here."""
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _changed_span(a: str, b: str, context: int) -> tuple[int, tuple[int, int]]:
    """Find the common start and the ends of the change, in whole lines with context."""
    start = _common_prefix(a, b)
    same = _common_suffix(a, b, min(len(a), len(b)) - start)
    for _ in range(context + 1):
        start = max(a.rfind("\n", 0, start), 0)
    start += a.startswith("\n", start) and start > 0
    end = len(a) - same
    for _ in range(context + 1):
        at = a.find("\n", end)
        end = len(a) if at < 0 else at + 1
    return start, (end, len(b) - (len(a) - end))


def _common_prefix(a: str, b: str) -> int:
    limit = min(len(a), len(b))
    at = 0
    while at < limit and a[at : at + BLOCK_CHARS] == b[at : at + BLOCK_CHARS]:
        at += BLOCK_CHARS
    low, high = min(at, limit), min(at + BLOCK_CHARS, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_suffix(a: str, b: str, limit: int) -> int:
    at = 0
    while at < limit:
        size = min(BLOCK_CHARS, limit - at)
        if a[len(a) - at - size : len(a) - at] != b[len(b) - at - size : len(b) - at]:
            break
        at += size
    low, high = at, min(at + BLOCK_CHARS, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle : len(a) - low] == b[len(b) - middle : len(b) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def _blocks(a: Sequence[str], b: Sequence[str]) -> list[DiffBlock]:
    """Compute the changed blocks by the algorithm of Myers; one block if it takes too long."""
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    a_end, b_end = len(a) - tail, len(b) - tail
    if head == a_end and head == b_end:
        return []
    path = None
    if head < a_end and head < b_end:
        path = _shortest_path(a[head:a_end], b[head:b_end])
    if path is None:
        return [DiffBlock(head, a_end, head, b_end)]
    return _merged([(head + x, head + y) for x, y in path], a_end, b_end, head)


def _shortest_path(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return the pairs of unchanged lines, in order; None beyond the bound."""
    n, m = len(a), len(b)
    furthest = {1: 0}  # By diagonal: the furthest position in `a`.
    trace: list[dict[int, int]] = []
    steps = 0
    for edits in range(min(n + m, EDITS_MAX) + 1):
        trace.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits
                and furthest.get(diagonal - 1, -1) < furthest.get(diagonal + 1, -1)
            )
            x = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
            begin = x
            while x < n and x - diagonal < m and a[x] == b[x - diagonal]:
                x += 1
            furthest[diagonal] = x
            steps += 1 + x - begin
            if x >= n and x - diagonal >= m:
                return _walked_back(trace, n, m)
        if steps > STEPS_MAX:
            return None
    return None


def _walked_back(trace: Sequence[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for edits in range(len(trace) - 1, -1, -1):
        furthest, diagonal = trace[edits], x - y
        down = diagonal == -edits or (
            diagonal != edits and furthest.get(diagonal - 1, -1) < furthest.get(diagonal + 1, -1)
        )
        before = diagonal + 1 if down else diagonal - 1
        from_x = furthest[before] if edits else 0
        from_y = from_x - before if edits else 0
        while x > from_x and y > from_y:
            x, y = x - 1, y - 1
            kept.append((x, y))
        x, y = from_x, from_y
    return kept[::-1]


def _merged(kept: list[tuple[int, int]], a_end: int, b_end: int, head: int) -> list[DiffBlock]:
    blocks: list[DiffBlock] = []
    a_at = b_at = head
    for x, y in (*kept, (a_end, b_end)):
        if x > a_at or y > b_at:
            blocks.append(DiffBlock(a_at, x, b_at, y))
        a_at, b_at = x + 1, y + 1
    return blocks
