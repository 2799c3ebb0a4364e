"""HTML split into text and tags, in one pass of linear time.

Owns the syntax of tags; `markdown.py` owns their meaning. The parser of the standard library takes
minutes for a megabyte of unclosed comments, and pages are untrusted.
"""

import html
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class HtmlTag:
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
