"""What of a run has been shown, and what a new state of it adds.

What was printed is compared with the state of the run, so that a connection that was lost neither
repeats nor loses a word.
"""

from collections.abc import Callable
from dataclasses import dataclass

from culm.cli.render.renderers import ActivityRenderer, AgentRenderer, RunRenderer
from culm.client.mirror import Mirror
from culm.client.tree import AgentBranch, SessionTree
from culm.ids import AgentId, AskId, MessageId, RunId
from culm.wire.agents import Agent
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


class RunView:
    """What of one run has been shown, so that each state of the mirror adds only what is new.

    Without a run it is a session of which everything is shown.
    """

    def __init__(
        self,
        face: ActivityRenderer,
        run_id: RunId | None,
        client_id: str = "",
        before_result: Callable[[], None] = lambda: None,
        *,
        shows_prompts: bool = False,
    ) -> None:
        self._face = face
        self._run_id = run_id
        self._shows_prompts = shows_prompts
        self._client_id = client_id
        self._before_result = before_result  # Shows what has led to it.
        self._done: set[MessageId] = set()  # Those that are shown to their end.
        self._texts: dict[MessageId, tuple[int, str]] = {}  # With their rev.
        self._calls: set[tuple[MessageId, str]] = set()
        self._going: dict[str, int] = {}  # Calls without a result: characters shown of each.
        self._unasked: dict[str, ToolCall] = {}  # Those of which no permission was told.
        self._asks: dict[AskId, AskState] = {}
        self._active = ""  # Who answered last.
        self._retry: RunRetry | None = None  # The latest that was told.

    def show(self, mirror: Mirror) -> bool:
        """Show what is new; True if the mirror does not know the run as one that goes on."""
        assert self._run_id is not None, "a run is shown"
        self.show_all(mirror)
        run = mirror.runs.get(self._run_id)
        return run is None or run.state == "held"

    def show_all(self, mirror: Mirror) -> None:
        self._show_retry(mirror)
        for message in mirror.messages.values():
            if message.id not in self._done and self._run_id in (None, message.run_id):
                self._show_message(mirror, message)
        self._show_asks(mirror)
        self._show_outputs(mirror)

    def _show_message(self, mirror: Mirror, message: Message) -> None:
        if message.role == "user" and self._shows_prompts:
            self._face.said(message.id, full_text(message.parts))
        if message.role == "assistant" and not message.is_summary_message:
            self._show_model(message)
            self._show_text(message)
            self._show_calls(message)
        for part in message.parts:
            if isinstance(part, ToolResultPart):
                self._show_asks(mirror)  # What was asked of it comes before.
                self._before_result()
                self._unasked.pop(part.data.tool_call_id, None)
                self._going.pop(part.data.tool_call_id, None)
                self._face.result(part.data)
        if message.role != "assistant" or is_finished(message.parts):
            self._done.add(message.id)
            self._texts.pop(message.id, None)

    def _show_retry(self, mirror: Mirror) -> None:
        of_session = next(reversed(mirror.retries.values()), None)
        retry = mirror.retries.get(self._run_id) if self._run_id is not None else of_session
        if retry is not None and retry is not self._retry:
            words = f"{retry.title}: {retry.details}" if retry.details else retry.title
            self._face.note(f"({words}; asking again in {retry.delay_s:.0f} s)")
        self._retry = retry

    def _show_model(self, message: Message) -> None:
        """Say so if another model has taken over."""
        name = f"{message.provider}/{message.model}"
        if self._active not in ("", name):
            self._face.note(f"({self._active} failed; {name} answers)")
        self._active = name

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
            if self._run_id not in (None, ask.run_id) or ask.state == before:
                continue
            self._asks[ask.ask_id] = ask.state
            self._unasked.pop(ask.tool_call_id, None)
            if before is None:
                self._face.ask(ask)
            if ask.state != "open":
                self._face.answered(ask, by_us=ask.by == self._client_id != "")
        for call_id in [one for one in self._unasked if one in mirror.granted]:
            self._face.allowed(self._unasked.pop(call_id))


@dataclass(slots=True)
class _Seat:
    """An agent, as it is shown."""

    face: AgentRenderer
    shown: RunView
    is_at_work: bool = False  # It was told that it has started, and not yet that it has ended.


class TreeView:
    """What of a run and of all who work for it has been shown."""

    def __init__(
        self,
        face: RunRenderer,
        run_id: RunId | None,
        tree: SessionTree,
        client_id: str = "",
        *,
        shows_prompts: bool = False,
    ) -> None:
        self._face = face
        self._tree = tree
        self._client_id = client_id
        self._seats: dict[AgentId, _Seat] = {}
        self._top = RunView(face, run_id, client_id, self._show_agents, shows_prompts=shows_prompts)

    @property
    def agents(self) -> int:
        """How many have worked for the run."""
        return len(self._seats)

    def show(self, _: Mirror) -> bool:
        """Show what is new; True if the run is not known as one that goes on."""
        is_over = self._top.show(self._tree)
        self._show_agents()
        return is_over

    def show_all(self) -> None:
        self._top.show_all(self._tree)
        self._show_agents()

    def at_work(self) -> list[Agent]:
        """Those that go on when the run is over."""
        return [branch.agent for branch in self._tree.branches.values()]

    def _show_agents(self) -> None:
        # To show one may show others in between, whose work it tells of.
        while self._tree.touched:
            session_id = next(iter(self._tree.touched))
            del self._tree.touched[session_id]
            branch = self._tree.branches[session_id]
            self._show_agent(branch)
            if branch.agent.state == "ended" and session_id not in self._tree.touched:
                self._tree.drop(session_id)

    def _show_agent(self, branch: AgentBranch) -> None:
        agent = branch.agent
        seat = self._seats.get(agent.agent_id)
        if seat is None:
            face = self._face.agent(agent)
            shown = RunView(face, None, self._client_id, self._show_agents)
            seat = self._seats[agent.agent_id] = _Seat(face, shown)
        if not seat.is_at_work:
            seat.is_at_work = True
            seat.face.started(agent)
        seat.shown.show_all(branch.mirror)
        if agent.state == "ended":
            seat.is_at_work = False
            seat.face.ended(agent)
