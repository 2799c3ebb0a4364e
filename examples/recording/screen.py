"""A small terminal emulator: bytes in, screen content out.

It supports what our output and the programs in a recording need: text, wide characters, cursor
movement, erasing, scrolling, and a few styles. It ignores everything else.
"""

import codecs
import re
import unicodedata
from dataclasses import dataclass, replace

TAB = 8
# ESC [ parameters letter · ESC ] text, up to BEL or ESC \ · ESC and one or two characters.
_SEQUENCE = re.compile(
    r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[0-Z\\^-~])"
)
_BEGUN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[ -/]*)\Z")
_SEQUENCE_CHARS_MAX = 4096  # Anything longer is not a sequence.


@dataclass(frozen=True, slots=True)
class Style:
    colour: int | None = None  # One of 256.
    bold: bool = False
    dim: bool = False


PLAIN = Style()
Cell = tuple[str, Style]
_BLANK: Cell = (" ", PLAIN)
_RIGHT_HALF: Cell = ("", PLAIN)  # Of a wide character.
Row = tuple[Cell, ...]


class Screen:
    """The screen of a terminal after all input so far, and the rows that were scrolled out."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns = columns
        self.rows = rows
        self.row = 0
        self.column = 0  # Equal to `columns` after the last column: the next character wraps.
        self.scrolled: list[Row] = []
        self._cells = [self._blank() for _ in range(rows)]
        self._style = PLAIN
        self._rest = ""  # An incomplete sequence.
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, data: bytes | str) -> None:
        text = self._rest + (data if isinstance(data, str) else self._decode(data))
        self._rest, at = "", 0
        while at < len(text):
            if text[at] != "\x1b":
                self._put(text[at])
                at += 1
            elif found := _SEQUENCE.match(text, at):
                self._execute(found[1] or "", found[2] or "")
                at = found.end()
            elif _BEGUN.match(text, at) and len(text) - at < _SEQUENCE_CHARS_MAX:
                self._rest = text[at:]
                return
            else:
                at += 1  # Not a sequence: skip the escape character.

    def lines(self) -> list[str]:
        """Return the text on the screen without trailing blanks and empty lines."""
        texts = [text_of(row) for row in self.cells()]
        while texts and not texts[-1]:
            texts.pop()
        return texts

    def all_lines(self) -> list[str]:
        """Return `lines` after the rows that were scrolled out."""
        return [*map(text_of, self.scrolled), *self.lines()]

    def cells(self) -> tuple[Row, ...]:
        return tuple(map(tuple, self._cells))

    def resize(self, columns: int, rows: int) -> None:
        """Resize the screen: wrap lines that are too long now; wrapped lines stay wrapped."""
        broken: list[list[Cell]] = []
        at = 0
        for number, row in enumerate(self._cells):
            if number == self.row:
                at = len(broken) + self.column // columns
            length = max((n for n, cell in enumerate(row, 1) if cell != _BLANK), default=1)
            broken += [row[begin : begin + columns] for begin in range(0, length, columns)]
        self.columns, self.rows, self.column = columns, rows, self.column % columns
        left = [[*row, *self._blank()][:columns] for row in broken]
        while len(left) > rows and at < len(left) - 1 and all(c == _BLANK for c in left[-1]):
            left.pop()
        while len(left) > rows and at > 0:
            self.scrolled.append(tuple(left.pop(0)))
            at -= 1
        self._cells = [*left, *(self._blank() for _ in range(rows))][:rows]
        self.row = min(at, rows - 1)

    def _put(self, one: str) -> None:
        match one:
            case "\n":
                self._down()
            case "\r":
                self.column = 0
            case "\b":
                self.column = max(min(self.column, self.columns - 1) - 1, 0)
            case "\t":
                self.column = min(self.column // TAB * TAB + TAB, self.columns - 1)
            case _ if unicodedata.category(one) in ("Cc", "Cf"):
                pass
            case _ if unicodedata.category(one) in ("Mn", "Me"):
                self._combine(one)
            case _:
                self._write(one, 2 if unicodedata.east_asian_width(one) in "WF" else 1)

    def _write(self, one: str, cells: int) -> None:
        if self.column + cells > self.columns:
            self._down()
            self.column = 0
        row = self._cells[self.row]
        # Overwriting half of a wide character removes it.
        if row[self.column] == _RIGHT_HALF:
            row[self.column - 1] = _BLANK
        end = self.column + cells
        if end < self.columns and row[end] == _RIGHT_HALF:
            row[end] = _BLANK
        row[self.column : end] = [(one, self._style), _RIGHT_HALF][:cells]
        self.column = end

    def _combine(self, one: str) -> None:
        row = self._cells[self.row]
        at = self.column - 1
        while at > 0 and row[at] == _RIGHT_HALF:
            at -= 1
        if at >= 0:
            row[at] = (row[at][0] + one, row[at][1])

    def _down(self) -> None:
        if self.row < self.rows - 1:
            self.row += 1
            return
        self.scrolled.append(tuple(self._cells.pop(0)))
        self._cells.append(self._blank())

    def _execute(self, parameters: str, letter: str) -> None:
        numbers = [int(one[:4]) if one.isdecimal() else 0 for one in parameters.split(";")]
        first = numbers[0]
        if parameters.startswith(("?", ">", "<", "=")):
            return
        match letter:
            case "A":
                self.row = max(self.row - max(first, 1), 0)
            case "B":
                self.row = min(self.row + max(first, 1), self.rows - 1)
            case "C":
                self.column = min(self.column + max(first, 1), self.columns - 1)
            case "D":
                self.column = max(min(self.column, self.columns - 1) - max(first, 1), 0)
            case "G":
                self.column = min(max(first, 1), self.columns) - 1
            case "H" | "f":
                self.row = min(max(first, 1), self.rows) - 1
                column = numbers[1] if len(numbers) > 1 else 1
                self.column = min(max(column, 1), self.columns) - 1
            case "K":
                self._erase_line(first)
            case "J":
                self._erase_screen(first)
            case "m":
                self._style = styled(self._style, numbers)
            case _:
                pass

    def _erase_line(self, how: int) -> None:
        row = self._cells[self.row]
        at = min(self.column, self.columns - 1)  # After the last column it counts as the last one.
        begin = at if how == 0 else 0
        end = at + 1 if how == 1 else self.columns
        row[begin:end] = [_BLANK] * (end - begin)

    def _erase_screen(self, how: int) -> None:
        self._erase_line(how)
        for number in range(self.rows):
            if how == 2 or (number > self.row if how == 0 else number < self.row):
                self._cells[number] = self._blank()

    def _blank(self) -> list[Cell]:
        return [_BLANK] * self.columns


def text_of(row: Row) -> str:
    return "".join(one for one, _ in row).rstrip()


def styled(style: Style, numbers: list[int]) -> Style:
    """Apply SGR to a style; 24-bit colors and backgrounds are ignored."""
    left = list(numbers)
    while left:
        match left.pop(0):
            case 0:
                style = PLAIN
            case 1:
                style = replace(style, bold=True)
            case 2:
                style = replace(style, dim=True)
            case 22:
                style = replace(style, bold=False, dim=False)
            case 39:
                style = replace(style, colour=None)
            case number if 30 <= number <= 37:
                style = replace(style, colour=number - 30)
            case number if 90 <= number <= 97:
                style = replace(style, colour=number - 90 + 8)
            case 38 | 48 as layer:
                kind = left.pop(0) if left else 0
                taken, left = (left[:1], left[1:]) if kind == 5 else ([], left[3:])
                if layer == 38 and taken and taken[0] < 256:
                    style = replace(style, colour=taken[0])
            case _:
                pass
    return style
