"""HTML as Markdown, or as plain text, for a model to read.

Owns the syntax of tags and the translation of each element. The result is meant to be read, not to
be rendered, so nothing in the text is escaped. Every input gives a result, in bounded time and
size: the parser of the standard library takes minutes for a megabyte of unclosed comments, and
pages are untrusted. docs/adr/0023 compares it with libraries.
"""

import html
import re
from collections.abc import Callable, Generator, Mapping
from urllib.parse import urljoin

from msgspec import Struct, field

ATTRIBUTE_CHARS_MAX = 4096
_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/>]*+)")
# Possessive: it never backtracks.
_ATTRIBUTE = re.compile(
    r"[\s/]*+([^\s/>=]++)(?:\s*+=\s*+(?:\"([^\"]*+)\"|'([^']*+)'|([^\s>]*+)))?+"
)
_TAG_END = re.compile(r"[^>]*+>?+")
# Their contents are text up to the end tag.
_RAW = {
    name: re.compile(rf"</{name}", re.IGNORECASE)
    for name in ("script", "style", "textarea", "title", "iframe", "noscript", "xmp", "noembed")
}
# Python refuses to parse longer numbers; a code point has seven digits.
_LONG_NUMBER = re.compile(r"&#[xX]?[0-9a-fA-F]{9,}+;?")


class HtmlTag(Struct, frozen=True):
    """One start or end tag."""

    name: str
    is_end: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])


def scan(text: str) -> Generator[str | HtmlTag]:
    """Yield text, without entities, and tags in order. Never raises."""
    at = 0
    while at < len(text):
        start = text.find("<", at)
        if start < 0:
            start = len(text)
        if start > at:
            yield unescape(text[at:start])
        if start == len(text):
            return
        found = _TAG.match(text, start)
        if found is None:
            at = _skip(text, start)
            if at == start:  # A literal sign.
                yield "<"
                at += 1
            continue
        tag, at = _tag(text, found)
        yield tag
        raw = None if tag.is_end else _RAW.get(tag.name)
        if raw is not None:
            end = raw.search(text, at)
            stop = len(text) if end is None else end.start()
            yield unescape(text[at:stop])
            at = stop


def unescape(text: str) -> str:
    if "&" not in text:
        return text
    return html.unescape(_LONG_NUMBER.sub("\ufffd", text))


def _skip(text: str, start: int) -> int:
    """Return the end of a comment or declaration that begins here; `start` if none does."""
    if text.startswith("<!--", start):
        end = text.find("-->", start + 2)
        return len(text) if end < 0 else end + 3
    if text.startswith(("<!", "<?", "</"), start):
        end = text.find(">", start)
        return len(text) if end < 0 else end + 1
    return start


def _tag(text: str, found: re.Match[str]) -> tuple[HtmlTag, int]:
    at = found.end()
    attributes: dict[str, str] = {}
    while attribute := _ATTRIBUTE.match(text, at):
        at = attribute.end()
        name = attribute[1][:100].lower()
        if name in ("href", "src", "alt", "class", "start") and name not in attributes:
            value = attribute[2] or attribute[3] or attribute[4] or ""
            attributes[name] = unescape(value[:ATTRIBUTE_CHARS_MAX])
    end = _TAG_END.match(text, at)
    assert end is not None
    return HtmlTag(found[2][:100].lower(), bool(found[1]), attributes), end.end()


# --- the translation of elements


BOXES_MAX = 24  # Nested lists and quotations; deeper ones count as this deep.
SPANS_MAX = 16
COLUMNS_MAX = 50
PARAGRAPH_CHARS_MAX = 200_000  # Then it is broken at any position.
_LOOK_EVERY = 1000  # Tags and texts between two checks of the stop flag.

_DROPPED = frozenset({
    "script", "style", "template", "svg", "nav", "iframe", "noscript", "noembed", "object",
    "canvas", "select", "math", "textarea", "audio", "video", "button", "dialog",
})  # fmt: skip
_BLOCKS = frozenset({
    "address", "article", "aside", "body", "center", "dd", "details", "div", "dl", "dt",
    "fieldset", "figcaption", "figure", "footer", "form", "head", "header", "html", "legend",
    "main", "p", "section", "summary", "tbody", "tfoot", "thead", "caption",
})  # fmt: skip
_MARKS = {"b": "**", "strong": "**", "i": "*", "em": "*", "del": "~~", "s": "~~"}
_CODE = frozenset({"code", "kbd", "samp", "tt"})
_LANGUAGE = re.compile(r"(?:^|\s)(?:language|lang|highlight-source)-([\w+#-]{1,30})")
_BLANKS = re.compile(r"\s+")
_TICKS = re.compile(r"`+")


class _Box(Struct):
    """An open list, an item of a list, or a quotation."""

    kind: str  # list, item, quote
    first: str = ""  # The prefix of its first line ...
    rest: str = ""  # ... and of the other lines.
    number: int | None = None  # The next number of a numbered list.
    has_items: bool = False


class _Span(Struct):
    """Marked text within a paragraph, and its start."""

    name: str
    start: int
    href: str = ""


class _Table(Struct):
    """An open table."""

    depth: int = 1  # Nested tables are part of a cell.
    row: list[str] = field(default_factory=list[str])
    is_in_cell: bool = False
    columns: int = 0  # The columns of the first row with several; 0 before that.


def render(
    text: str, base: str, chars_max: int, stopped: Callable[[], bool], *, plain: bool
) -> str:
    """Convert a page, up to `chars_max` characters. Links are made absolute."""
    page = _Page(base, plain=plain)
    for n, piece in enumerate(scan(text)):
        if isinstance(piece, str):
            page.on_text(piece)
        elif piece.is_end:
            page.on_end(piece.name)
        else:
            page.on_start(piece)
        if page.size > chars_max or (n % _LOOK_EVERY == 0 and stopped()):
            break
    return page.finish()[:chars_max]


class _Page:
    """Converts the tags and text of one page."""

    def __init__(self, base: str, *, plain: bool) -> None:
        self.size = 0
        self._base = base
        self._plain = plain
        self._lines: list[str] = []
        self._has_gap = False  # True if an empty line comes before the next block.
        self._texts: list[str] = []  # The text of the open paragraph.
        self._chars = 0
        self._spans: list[_Span] = []
        self._boxes: list[_Box] = []
        self._heading = 0
        self._dropped: list[str] = []  # The open elements, all of one name, that are left out.
        self._code: list[str] | None = None  # The text of an open `pre`.
        self._language = ""
        self._table: _Table | None = None

    def finish(self) -> str:
        self._end_code()
        self._end_table()
        self._flush()
        return "\n".join(self._lines).strip("\n")

    def on_text(self, text: str) -> None:
        if self._dropped:
            return
        text = text.replace("\0", "")
        if self._code is not None:
            self._code.append(text)
            self.size += len(text)
            return
        self._add_text(_BLANKS.sub(" ", text))
        if self._chars > PARAGRAPH_CHARS_MAX:
            self._flush()

    def on_start(self, tag: HtmlTag) -> None:
        name = tag.name
        if self._dropped:
            if name == self._dropped[0] and name != "select":
                self._dropped.append(name)
            return
        if name in _DROPPED:
            self._dropped.append(name)
        elif self._code is not None:
            self._language = self._language or _language(tag)
            if name == "br":
                self._code.append("\n")
        elif name in ("table", "tr", "td", "th"):
            self._start_table(name)
        elif name in ("ul", "ol", "li", "blockquote"):
            self._start_box(tag)
        elif name == "pre" and self._table is None:
            self._flush()
            self._code, self._language = [], _language(tag)
        elif name in _MARKS or name in _CODE or name == "a":
            if len(self._spans) < SPANS_MAX:
                self._spans.append(_Span(name, len(self._texts), tag.attributes.get("href", "")))
        else:
            self._start_other(tag)

    def _start_other(self, tag: HtmlTag) -> None:
        name = tag.name
        if name == "br":
            self._add_text("\n" if self._table is None else " ")
        elif name == "img":
            self._image(tag)
        elif name == "hr":
            self._flush()
            self._block(["---"])
        elif name == "title" or _is_heading(name):
            self._flush()
            self._heading = 1 if name == "title" else int(name[1])
        elif name in _BLOCKS or name == "pre":
            self._flush()

    def on_end(self, name: str) -> None:
        if self._dropped:
            if name == self._dropped[0]:
                self._dropped.pop()
        elif self._code is not None:
            if name == "pre":
                self._end_code()
        elif name in ("table", "tr", "td", "th"):
            self._end_part(name)
        elif name in ("ul", "ol", "li", "blockquote"):
            self._flush()
            self._end_box({"li": "item", "blockquote": "quote"}.get(name, "list"))
        elif name in _MARKS or name in _CODE or name == "a":
            self._end_span(name)
        elif name == "title" or _is_heading(name) or name in _BLOCKS:
            self._flush()
            self._heading = 0

    # --- text and paragraphs

    def _add_text(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._chars += len(text)

    def _image(self, tag: HtmlTag) -> None:
        alt = _BLANKS.sub(" ", tag.attributes.get("alt", "")).strip()
        if alt:
            source = self._absolute(tag.attributes.get("src", ""))
            self._add_text(f"![{alt}]({source})" if source and not self._plain else f"[{alt}]")

    def _end_span(self, name: str) -> None:
        n = next((n for n in reversed(range(len(self._spans))) if self._spans[n].name == name), -1)
        if n >= 0:
            for span in reversed(self._spans[n:]):
                self._mark(span)
            del self._spans[n:]

    def _mark(self, span: _Span) -> None:
        """Put the marks of a span around its text, with its outer blanks outside."""
        text = "".join(self._texts[span.start :])
        content = text.strip()
        if not content or self._plain:
            return
        marked = self._marked(span, content)
        before = text[: len(text) - len(text.lstrip())]
        after = text[len(text.rstrip()) :]
        self._texts[span.start :] = [before + marked + after]
        self._chars += len(marked) - len(content)

    def _marked(self, span: _Span, content: str) -> str:
        if span.name in _CODE:
            ticks = _fence(content, 1)
            edge = " " if content.startswith("`") or content.endswith("`") else ""
            return f"{ticks}{edge}{content}{edge}{ticks}"
        if span.name == "a":
            href = self._absolute(span.href)
            return f"[{content}]({href})" if href else content
        mark = _MARKS[span.name]
        return f"{mark}{content}{mark}"

    def _absolute(self, href: str) -> str:
        """Return a link to another page as an absolute URL; "" for others and for scripts."""
        href = href.strip()
        if not href or href.startswith("#"):
            return ""
        try:
            absolute = urljoin(self._base, href)
        except ValueError:
            return ""
        is_useful = absolute.startswith(("http://", "https://", "mailto:"))
        return _BLANKS.sub("%20", absolute) if is_useful else ""

    def _take_text(self) -> str:
        """Return the text of the finished paragraph; open spans continue in the next one."""
        for span in reversed(self._spans):
            self._mark(span)
            span.start = 0
        text = re.sub(" {2,}", " ", "".join(self._texts))
        self._texts.clear()
        self._chars = 0
        return re.sub(" ?\n ?", "\n", text).strip()

    def _flush(self) -> None:
        if self._table is not None and self._table.is_in_cell:
            self._add_text(" ")
            return
        text = self._take_text()
        if not text:
            return
        if self._heading:
            marks = "" if self._plain else "#" * self._heading + " "
            self._block([marks + text.replace("\n", " ")])
        else:
            self._block(text.split("\n"))

    def _block(self, lines: list[str]) -> None:
        if self._has_gap and self._lines:
            self._put("", "".join(box.rest for box in self._boxes if not box.first))
        for line in lines:
            front = "".join(box.first or box.rest for box in self._boxes)
            for box in self._boxes:
                box.first = ""
            self._put(line, front)
        self._has_gap = True

    def _put(self, line: str, front: str) -> None:
        whole = (front + line).rstrip()
        self._lines.append(whole)
        self.size += len(whole) + 1

    # --- lists, quotations, code

    def _start_box(self, tag: HtmlTag) -> None:
        self._flush()
        name = tag.name
        if name == "li":
            self._start_item()
        elif len(self._boxes) >= BOXES_MAX or self._table is not None:
            return
        elif name == "blockquote":
            self._boxes.append(_Box("quote", "> ", "> "))
        else:
            start = tag.attributes.get("start", "")
            first = int(start) if start.isascii() and start.isdigit() and len(start) < 7 else 1
            if self._find_box("list") >= 0:
                self._has_gap = False
            self._boxes.append(_Box("list", number=first if name == "ol" else None))

    def _start_item(self) -> None:
        if self._table is not None:
            self._add_text("- ")
            return
        if self._find_box("item") > self._find_box("list"):
            self._end_box("item")
        n = self._find_box("list")
        marker = "- "
        if n >= 0:
            outer = self._boxes[n]
            if outer.has_items:
                self._has_gap = False
            outer.has_items = True
            if outer.number is not None:
                marker = f"{outer.number}. "
                outer.number += 1
        if len(self._boxes) <= BOXES_MAX:
            self._boxes.append(_Box("item", marker, " " * len(marker)))

    def _find_box(self, kind: str) -> int:
        found = (n for n in reversed(range(len(self._boxes))) if self._boxes[n].kind == kind)
        return next(found, -1)

    def _end_box(self, kind: str) -> None:
        n = self._find_box(kind)
        if n < 0 or (kind == "item" and n < self._find_box("list")):
            return
        del self._boxes[n:]
        self._has_gap = True

    def _end_code(self) -> None:
        if self._code is None:
            return
        text = "".join(self._code).strip("\n").expandtabs(8).replace("\r\n", "\n")
        self._code = None
        if not text.strip():
            return
        lines = text.split("\n")
        if not self._plain:
            fence = _fence(text, 3)
            lines = [fence + self._language, *lines, fence]
        self._block(lines)

    # --- tables

    def _start_table(self, name: str) -> None:
        table = self._table
        if table is None:
            self._flush()
            self._table = _Table() if name == "table" else None
        elif name == "table":
            table.depth += 1
            self._add_text(" ")
        elif table.depth > 1:
            self._add_text(" ")
        elif name == "tr":
            self._end_row(table)
        else:
            self._end_cell(table)
            self._flush()  # Text outside of cells becomes a paragraph before the table.
            table.is_in_cell = True

    def _end_part(self, name: str) -> None:
        table = self._table
        if table is None:
            self._flush()
        elif table.depth > 1:
            table.depth -= name == "table"
            self._add_text(" ")
        elif name == "table":
            self._end_table()
        elif name == "tr":
            self._end_row(table)
        else:
            self._end_cell(table)

    def _end_cell(self, table: _Table) -> None:
        if table.is_in_cell:
            table.is_in_cell = False
            text = self._take_text().replace("\n", " ")
            if len(table.row) < COLUMNS_MAX:
                table.row.append(text)

    def _end_row(self, table: _Table) -> None:
        self._end_cell(table)
        row, table.row = table.row, []
        if not any(row):
            return
        if len(row) == 1 and not table.columns:  # Not a table but page layout.
            self._block([row[0]])
            return
        cells = row if self._plain else [cell.replace("|", "\\|") for cell in row]
        self._has_gap &= not table.columns
        self._block([f"| {' | '.join(cells)} |"])
        if not table.columns:
            table.columns = len(row)
            if not self._plain:
                self._has_gap = False
                self._block([f"|{' --- |' * len(row)}"])

    def _end_table(self) -> None:
        if self._table is not None:
            self._end_row(self._table)
            self._table = None
            self._has_gap = True


def _is_heading(name: str) -> bool:
    return len(name) == 2 and name[0] == "h" and name[1] in "123456"


def _language(tag: HtmlTag) -> str:
    found = _LANGUAGE.search(tag.attributes.get("class", ""))
    return found[1] if found else ""


def _fence(text: str, least: int) -> str:
    """Return more backticks than occur in a row in the text."""
    longest = max((len(run) for run in _TICKS.findall(text)), default=0)
    return "`" * max(least, longest + 1)
