"""Language servers: their state and what they found."""

from datetime import datetime
from typing import Literal

from msgspec import Struct

LspState = Literal[0, 1, 2, 3, 4, 5]  # Unstarted, starting, ready, error, stopped, disabled.


class LspInfo(Struct):
    name: str
    state: LspState
    connected_at: datetime
    error: str = ""
    diagnostic_count: int = 0


class Position(Struct):
    line: int
    character: int


class Range(Struct):
    start: Position
    end: Position


class Diagnostic(Struct):
    range: Range
    severity: int
    message: str
    source: str = ""


class StartLsp(Struct):
    path: str = ""


class LspEvent(Struct):
    type: Literal["state_changed", "diagnostics_changed"]
    name: str
    state: LspState
    error: str = ""
    diagnostic_count: int = 0
