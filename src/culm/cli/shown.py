"""What of a run has been shown, and what a new state of it adds.

What was printed is compared with the state of the run, so that a connection that was lost neither
repeats nor loses a word.
"""

from culm.cli.faces import Face
from culm.client.stream import Mirror
from culm.ids import AskId, MessageId, RunId
from culm.wire.asks import AskState
from culm.wire.messages import (
    Message,
    ToolCall,
    ToolCallPart,
    ToolResultPart,
    full_text,
    is_finished,
)
from culm.wire.runs import RunRetry


class Shown:
    """What of one run has been shown, so that each state of the mirror adds only what is new."""

    def __init__(self, face: Face, run_id: RunId, mirror: Mirror, client_id: str = "") -> None:
        self._face = face
        self._run_id = run_id
        self._client_id = client_id
        self._others = set(mirror.messages)  # Of other runs, and what is shown to its end.
        self._texts: dict[MessageId, tuple[int, str]] = {}  # With their rev.
        self._calls: set[tuple[MessageId, str]] = set()
        self._going: dict[str, int] = {}  # Calls without a result: characters shown of each.
        self._unasked: dict[str, ToolCall] = {}  # Those of which no permission was told.
        self._asks: dict[AskId, AskState] = {}
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
            self._show_outputs(mirror)
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
                    self._show_asks(mirror)  # What was asked of it comes before.
                    self._unasked.pop(part.data.tool_call_id, None)
                    self._going.pop(part.data.tool_call_id, None)
                    self._face.result(part.data)
            if message.role != "assistant" or is_finished(message.parts):
                self._others.add(message.id)
        self._show_asks(mirror)

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
                    self._going[part.data.id] = 0
                    self._unasked[part.data.id] = part.data
                    self._face.call(part.data)

    def _show_outputs(self, mirror: Mirror) -> None:
        for call_id, shown in self._going.items():
            text = mirror.outputs.get(call_id, "")
            if len(text) > shown:
                self._going[call_id] = len(text)
                self._face.output(call_id, text[shown:])

    def _show_asks(self, mirror: Mirror) -> None:
        for ask in mirror.asks.values():
            before = self._asks.get(ask.ask_id)
            if ask.run_id != self._run_id or ask.state == before:
                continue
            self._asks[ask.ask_id] = ask.state
            self._unasked.pop(ask.tool_call_id, None)
            if before is None:
                self._face.ask(ask)
            if ask.state != "open":
                self._face.answered(ask, by_us=ask.by == self._client_id != "")
        for call_id in [one for one in self._unasked if one in mirror.granted]:
            self._face.allowed(self._unasked.pop(call_id))
