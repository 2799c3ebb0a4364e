"""How one run looks to a person, or to a script: what is printed of it, and where.

Data goes to stdout, all else to stderr. What was printed is compared with the state of the run,
so that a connection that was lost neither repeats nor loses a word.
"""

import re
import sys
from typing import IO, AnyStr, Protocol

from culm.client.stream import Mirror
from culm.errors import Failed
from culm.ids import MessageId, RunId
from culm.wire.codec import Json, encode, printable
from culm.wire.messages import (
    Message,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    full_text,
    is_finished,
)
from culm.wire.runs import Run, RunRetry

HEAD_CHARS = 200  # Of a call's input or an error, on one line.

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # All but tab and newline.


class StdoutClosed(Exception):
    """Whoever read the answer has left."""


class Face(Protocol):
    """How a run is shown."""

    def text(self, message_id: MessageId, text: str) -> None: ...
    def again(self, message_id: MessageId) -> None:
        """All text of the message is void; it begins anew."""
        ...

    def call(self, call: ToolCall) -> None: ...
    def result(self, result: ToolResult) -> None: ...
    def note(self, words: str) -> None: ...
    def end(self, run: Run, text: str) -> None: ...


class Plain:
    """For people: the answer on stdout, one line for everything else on stderr."""

    def __init__(self) -> None:
        self._in_line = False
        self._message_id = ""
        self._is_screen = sys.stdout.isatty()

    def text(self, message_id: MessageId, text: str) -> None:
        if message_id != self._message_id:
            self._end_line()
            self._message_id = message_id
        # A model may repeat what stands in a file; a terminal would obey it.
        shown = _CONTROL.sub("", text) if self._is_screen else text
        try:
            _write(sys.stdout, shown)
        except UnicodeEncodeError:
            _write(sys.stdout, shown.encode("ascii", "backslashreplace").decode())
        self._in_line = not text.endswith("\n")

    def again(self, message_id: MessageId) -> None:
        self.note("(asked again)")

    def call(self, call: ToolCall) -> None:
        self.note(f"→ {call.name} {head_of(call.input)}")

    def result(self, result: ToolResult) -> None:
        failed = f"✗ {result.name}: {head_of(result.content)}"
        self.note(failed if result.is_error else f"← {result.name}: {len(result.content):,} chars")

    def note(self, words: str) -> None:
        self._end_line()
        _note(words)

    def end(self, run: Run, text: str) -> None:
        self._end_line()
        if run.outcome != "end_turn":
            words, hint = words_of(run)
            self.note(f"culm: {words}")
            self.note(f"hint: {hint}")

    def _end_line(self) -> None:
        if self._in_line:
            _write(sys.stdout, "\n")
            self._in_line = False


class JsonLines:
    """For programs: one object a line on stdout; stderr is for people still."""

    def text(self, message_id: MessageId, text: str) -> None:
        self._put("text", text=text, message_id=message_id)

    def again(self, message_id: MessageId) -> None:
        self._put("again", message_id=message_id)

    def call(self, call: ToolCall) -> None:
        self._put("call", id=call.id, name=call.name, input=call.input)

    def result(self, result: ToolResult) -> None:
        content, is_error = result.content, result.is_error
        self._put("result", id=result.tool_call_id, is_error=is_error, content=content)

    def note(self, words: str) -> None:
        _note(words)

    def end(self, run: Run, text: str) -> None:
        self._put(
            "end",
            outcome=run.outcome or run.state,
            run_id=run.id,
            session_id=run.session_id,
            text=text,
            error=": ".join(filter(None, (run.title, run.details))),
            provider=run.provider,
            model=run.model,
            steps=run.steps,
            prompt_tokens=run.prompt_tokens,
            completion_tokens=run.completion_tokens,
            cost=run.cost,
        )

    def _put(self, kind: str, **fields: Json) -> None:
        # Bytes: JSON is UTF-8, whatever the terminal speaks.
        _write(sys.stdout.buffer, encode({"type": kind, **fields}) + b"\n")


def _note(words: str) -> None:
    """Tell a person. What files, models and providers say must not move the terminal."""
    lines = "\n".join(map(printable, words.split("\n")))
    try:
        _write(sys.stderr, f"{lines}\n")
    except UnicodeEncodeError:
        _write(sys.stderr, lines.encode("ascii", "backslashreplace").decode() + "\n")


def _write(stream: IO[AnyStr], data: AnyStr) -> None:
    try:
        stream.write(data)
        stream.flush()
    except BrokenPipeError as exc:
        raise StdoutClosed from exc
    except OSError as exc:
        raise Failed(f"cannot write: {exc.strerror}", hint="the run goes on") from exc


def head_of(text: str) -> str:
    """The beginning of a text, on one line that no terminal obeys."""
    words = _CONTROL.sub("", " ".join(text[: 2 * HEAD_CHARS].split()))
    return words if len(words) <= HEAD_CHARS else words[: HEAD_CHARS - 1] + "…"


def words_of(run: Run) -> tuple[str, str]:
    """What became of a run that did not end well, and what to do about it."""
    go_on = f"`culm run --session {run.session_id}` goes on from here"
    # The details of a failure may bring their own hint, as a line.
    reason, _, own = ": ".join(filter(None, (run.title, run.details))).partition("\nhint: ")
    if run.state == "held":
        return f"the run is held: {reason}", f"{go_on}; the held prompt can be started or dropped"
    match run.outcome:
        case "canceled":
            return "cancelled", go_on
        case "max_tokens":
            return "the answer was cut off: the model may write no more at once", go_on
        case "denied":
            return "the run ended because a call was denied", go_on
        case _:
            return reason or f"the run ended: {run.outcome}", own or go_on


class Shown:
    """What of one run has been shown, so that each state of the mirror adds only what is new."""

    def __init__(self, face: Face, run_id: RunId, mirror: Mirror) -> None:
        self._face = face
        self._run_id = run_id
        self._others = set(mirror.messages)  # Of other runs, and what is shown to its end.
        self._texts: dict[MessageId, tuple[int, str]] = {}  # With their rev.
        self._calls: set[tuple[MessageId, str]] = set()
        self._began = False
        self._speaker = ""  # Who answered last.
        self._retry: RunRetry | None = None  # The latest that was told.

    def show(self, mirror: Mirror) -> bool:
        """Show what is new; True if the mirror does not know the run as one that goes on."""
        run = mirror.runs.get(self._run_id)
        if run is not None and run.state in ("accepted", "queued"):
            self._others |= mirror.messages.keys()  # It waits: all this is by others.
        elif run is not None:
            self._began = True
        self._show_retry(mirror.retries.get(self._run_id))
        if self._began:
            self.show_all(mirror)
        return run is None or run.state == "held"

    def show_all(self, mirror: Mirror) -> None:
        for message in mirror.messages.values():
            if message.id in self._others:
                continue
            if message.role == "assistant" and not message.is_summary_message:
                self._show_speaker(message)
                self._show_text(message)
                self._show_calls(message)
            for part in message.parts:
                if isinstance(part, ToolResultPart):
                    self._face.result(part.data)
            if message.role != "assistant" or is_finished(message.parts):
                self._others.add(message.id)

    def _show_retry(self, retry: RunRetry | None) -> None:
        if retry is not None and retry is not self._retry:
            words = f"{retry.title}: {retry.details}" if retry.details else retry.title
            self._face.note(f"({words}; asking again in {retry.delay_s:.0f} s)")
        self._retry = retry

    def _show_speaker(self, message: Message) -> None:
        """Say so if another model has taken over."""
        name = f"{message.provider}/{message.model}"
        if self._speaker not in ("", name):
            self._face.note(f"({self._speaker} failed; {name} answers)")
        self._speaker = name

    def _show_text(self, message: Message) -> None:
        rev, shown = self._texts.get(message.id, (0, ""))
        text = full_text(message.parts)
        # Within one rev text only grows.
        if message.rev != rev and not text.startswith(shown):
            if shown.startswith(text) and is_finished(message.parts):
                self._face.note(f"(the last {len(shown) - len(text):,} characters were lost)")
                shown = text
            else:
                self._face.again(message.id)
                shown = ""
        self._texts[message.id] = message.rev, text
        if len(text) > len(shown):
            self._face.text(message.id, text[len(shown) :])

    def _show_calls(self, message: Message) -> None:
        for part in message.parts:
            if isinstance(part, ToolCallPart) and part.data.finished:
                key = message.id, part.data.id
                if key not in self._calls:
                    self._calls.add(key)
                    self._face.call(part.data)


# --- what is asked, and where
