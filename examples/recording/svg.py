"""Still pictures as one animated SVG: no script, no font, no external resources.

All pictures are side by side on a strip, which jumps from one to the next behind a window. Rows
that were scrolled out keep their place above, so that lines, and blocks of them, are drawn once and
reused in every picture: some hundred pictures take some tens of kilobytes.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from xml.sax.saxutils import escape

from examples.recording.frames import Frame
from examples.recording.screen import PLAIN, Row, Style

CELL, LINE, FONT = 8.4, 19, 14  # Pixels. The width of a monospaced character is 0.6 of its height.
BASE = 14  # The baseline, from the top of a line.
MARGIN, BAR = 14, 34
BLOCK = 4  # Lines that are drawn together: few enough to be reused, enough to save space.
GROUND, WINDOW_EDGE, TEXT, FAINT = "#12161c", "#2d333b", "#d7dde5", "#8a94a1"
LIGHTS = ("#ff5f57", "#febc2e", "#28c840")
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
# Legible on a dark background; eight colors, and their bright versions.
COLOURS = (
    *("#6b7685", "#ff7b72", "#56d364", "#e3b341", "#79b8ff", "#d2a8ff", "#56d4dd", "#c9d1d9"),
    *("#8b949e", "#ffa198", "#7ee787", "#f2cc60", "#a5d6ff", "#e2c5ff", "#8ae9f0", "#ffffff"),
)
_STEPS = (0, 95, 135, 175, 215, 255)


def svg_of(frames: Sequence[Frame], title: str) -> str:
    """Return the drawing; with reduced motion it shows the last picture."""
    columns, rows = len(frames[0].rows[0]), len(frames[0].rows)
    inner_width, inner_height = round(columns * CELL), rows * LINE
    width, height = inner_width + 2 * MARGIN, inner_height + BAR + MARGIN
    paper = _Paper()
    shown = [paper.frame(frame, number * width) for number, frame in enumerate(frames)]
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" xml:space="preserve">',
            f"<title>{escape(title)}</title>",
            f"<style>{_rules(frames, width)}</style>",
            f"<defs>{paper.definitions()}</defs>",
            *_window(width, height, title),
            f'<svg x="{MARGIN}" y="{BAR}" width="{inner_width}" height="{inner_height}">',
            f'<g class="s">{"".join(shown)}</g></svg></svg>\n',
        ]
    )


def _rules(frames: Sequence[Frame], width: int) -> str:
    total_s = sum(frame.duration_s for frame in frames)
    moves: list[str] = []
    at_s = 0.0
    for number, frame in enumerate(frames):
        moves.append(f"{at_s / total_s:.3%}{{transform:translateX({-number * width}px)}}")
        at_s += frame.duration_s
    last = f"transform:translateX({-(len(frames) - 1) * width}px)"
    return (
        f"text{{font:{FONT}px {FONTS};fill:{TEXT};white-space:pre}}"
        f".b{{font-weight:700}}.d{{fill:{FAINT}}}.c{{fill:{TEXT};opacity:.35}}"
        f".s{{animation:s {total_s:.2f}s steps(1,end) infinite}}"
        f"@keyframes s{{{''.join(moves)}to{{{last}}}}}"
        f"@media(prefers-reduced-motion:reduce){{.s{{animation:none;{last}}}}}"
    )


def _window(width: int, height: int, title: str) -> Iterator[str]:
    yield (
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="9" '
        f'fill="{GROUND}" stroke="{WINDOW_EDGE}"/>'
    )
    for number, colour in enumerate(LIGHTS):
        yield f'<circle cx="{20 + 19 * number}" cy="17" r="5.5" fill="{colour}"/>'
    yield f'<text class="d" x="{width / 2:g}" y="21" text-anchor="middle">{escape(title)}</text>'


class _Paper:
    """All printed rows from top to bottom, and the ids of drawn elements."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # Ids by element; parts come before their containers.
        self._rows: list[Row] = []  # Their last state; rows above the screen do not change.

    def definitions(self) -> str:
        return "".join(f'<g id="{name}">{drawn}</g>' for drawn, name in self._names.items())

    def frame(self, frame: Frame, x: int) -> str:
        self._rows += [()] * (frame.top - len(self._rows))  # Rows that were never visible.
        self._rows[frame.top :] = frame.rows
        # A block that is partly above the screen is used as a whole: the window clips it.
        first = frame.top // BLOCK * BLOCK
        used = "".join(self._block(begin) for begin in range(first, len(self._rows), BLOCK))
        row, column = frame.cursor
        place = f'x="{column * CELL:g}" y="{(frame.top + row) * LINE + 2}"'
        cursor = f'<rect class="c" {place} width="{CELL}" height="{LINE - 2}"/>'
        return f'<g transform="translate({x} {-frame.top * LINE})">{used}{cursor}</g>'

    def _block(self, begin: int) -> str:
        used: list[str] = []
        for number, row in enumerate(self._rows[begin : begin + BLOCK], begin):
            if line := "".join(_texts(row)):
                used.append(f'<use href="#{self._name(line)}" y="{number * LINE}"/>')
        return f'<use href="#{self._name("".join(used))}"/>' if used else ""

    def _name(self, drawn: str) -> str:
        return self._names.setdefault(drawn, f"x{len(self._names):x}")


def _texts(row: Row) -> Iterator[str]:
    """Yield runs of one style with an explicit width, so that columns align in every font."""
    at = 0
    # The right half of a wide character has no text and no style.
    looks = [style if one else row[n - 1][1] for n, (one, style) in enumerate(row)]
    for style, run in groupby(zip(looks, row, strict=True), key=itemgetter(0)):
        cells = [one for _, (one, _) in run]
        text = "".join(cells)
        left = len(text) - len(text.lstrip(" "))
        kept = text.strip(" ")
        if kept:
            wide = len(cells) - left - (len(text) - len(text.rstrip(" ")))
            place = f'x="{(at + left) * CELL:g}" y="{BASE}" textLength="{wide * CELL:g}"'
            yield f"<text {place}{_look(style)}>{escape(kept)}</text>"
        at += len(cells)


def _look(style: Style) -> str:
    if style == PLAIN:
        return ""
    classes = " ".join(filter(None, ("b" if style.bold else "", "d" if style.dim else "")))
    shown = f' class="{classes}"' if classes else ""
    # A class rule overrides an attribute, and a style overrides the rule.
    return shown if style.colour is None else f'{shown} style="fill:{colour_of(style.colour)}"'


def colour_of(number: int) -> str:
    """Return one of 256 colors: ours, one of the cube, or a gray."""
    if number < 16:
        return COLOURS[number]
    if number >= 232:
        grey = 8 + 10 * (number - 232)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    red, green, blue = (number - 16) // 36, (number - 16) // 6 % 6, (number - 16) % 6
    return "#" + "".join(f"{_STEPS[one]:02x}" for one in (red, green, blue))
