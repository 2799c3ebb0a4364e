"""Incremental rendering: passes to a renderer only the parts of a mirror that are new.

Compares the shown text with the state of the run, so that a lost connection neither repeats nor
loses anything.
"""

from collections.abc import Callable

from msgspec import Struct

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
    """The shown part of one run; each new state of the mirror adds the difference.

    Without a `run_id` all runs of the session are shown.
    """

    def __init__(
        self,
        renderer: ActivityRenderer,
        run_id: RunId | None,
        client_id: str = "",
        before_result: Callable[[], None] = lambda: None,
        *,
        shows_prompts: bool = False,
    ) -> None:
        self._renderer = renderer
        self._run_id = run_id
        self._shows_prompts = shows_prompts
        self._client_id = client_id
        self._before_result = before_result  # Shows the work of sub-agents that led to it.
        self._done: set[MessageId] = set()  # Messages that are shown completely.
        self._texts: dict[MessageId, tuple[int, str]] = {}  # Rev and shown text of each message.
        self._calls: set[tuple[MessageId, str]] = set()
        self._running: dict[str, int] = {}  # Calls without a result, with the characters shown.
        self._unasked: dict[str, ToolCall] = {}  # Calls without an ask.
        self._asks: dict[AskId, AskState] = {}
        self._model = ""  # The model of the last answer.
        self._retry: RunRetry | None = None  # The last one shown.

    def show(self, mirror: Mirror) -> bool:
        """Show new parts; return True if the run is held or the mirror no longer has it."""
        assert self._run_id is not None, "a view of a session has no run to wait for"
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
            self._renderer.user_message(message.id, full_text(message.parts))
        if message.role == "assistant" and not message.is_summary_message:
            self._show_model(message)
            self._show_text(message)
            self._show_calls(message)
        for part in message.parts:
            if isinstance(part, ToolResultPart):
                self._show_asks(mirror)  # The asks of a call come before its result.
                self._before_result()
                self._unasked.pop(part.data.tool_call_id, None)
                self._running.pop(part.data.tool_call_id, None)
                self._renderer.result(part.data)
        if message.role != "assistant" or is_finished(message.parts):
            self._done.add(message.id)
            self._texts.pop(message.id, None)

    def _show_retry(self, mirror: Mirror) -> None:
        of_session = next(reversed(mirror.retries.values()), None)
        retry = mirror.retries.get(self._run_id) if self._run_id is not None else of_session
        if retry is not None and retry is not self._retry:
            reason = f"{retry.title}: {retry.details}" if retry.details else retry.title
            self._renderer.note(f"({reason}; retrying in {retry.delay_s:.0f} s)")
        self._retry = retry

    def _show_model(self, message: Message) -> None:
        """Add a note if another model has taken over."""
        name = f"{message.provider}/{message.model}"
        if self._model not in ("", name):
            self._renderer.note(f"({self._model} failed; {name} answers)")
        self._model = name

    def _show_text(self, message: Message) -> None:
        rev, shown = self._texts.get(message.id, (0, ""))
        text = full_text(message.parts)
        # Within one rev the text only grows.
        if message.rev != rev and not text.startswith(shown):
            if shown.startswith(text) and is_finished(message.parts):
                self._renderer.note(f"(the last {len(shown) - len(text):,} characters were lost)")
                shown = text
            else:
                self._renderer.restarted(message.id)
                shown = ""
        self._texts[message.id] = message.rev, text
        if len(text) > len(shown):
            self._renderer.text(message.id, text[len(shown) :])

    def _show_calls(self, message: Message) -> None:
        for part in message.parts:
            if isinstance(part, ToolCallPart) and part.data.finished:
                key = message.id, part.data.id
                if key not in self._calls:
                    self._calls.add(key)
                    self._running[part.data.id] = 0
                    self._unasked[part.data.id] = part.data
                    self._renderer.call(part.data)

    def _show_outputs(self, mirror: Mirror) -> None:
        for call_id, shown in self._running.items():
            text = mirror.outputs.get(call_id, "")
            if len(text) > shown:
                self._running[call_id] = len(text)
                self._renderer.output(call_id, text[shown:])

    def _show_asks(self, mirror: Mirror) -> None:
        for ask in mirror.asks.values():
            before = self._asks.get(ask.ask_id)
            if self._run_id not in (None, ask.run_id) or ask.state == before:
                continue
            self._asks[ask.ask_id] = ask.state
            self._unasked.pop(ask.tool_call_id, None)
            if before is None:
                self._renderer.ask(ask)
            if ask.state != "open":
                self._renderer.answered(ask, by_us=ask.by == self._client_id != "")
        for call_id in [one for one in self._unasked if one in mirror.granted]:
            self._renderer.allowed(self._unasked.pop(call_id))


class _AgentView(Struct):
    """The shown part of one agent."""

    renderer: AgentRenderer
    view: RunView
    is_running: bool = False  # Its start was shown, and its end was not.


class TreeView:
    """The shown part of a run and of all its sub-agents."""

    def __init__(
        self,
        renderer: RunRenderer,
        run_id: RunId | None,
        tree: SessionTree,
        client_id: str = "",
        *,
        shows_prompts: bool = False,
    ) -> None:
        self._renderer = renderer
        self._tree = tree
        self._client_id = client_id
        self._agents: dict[AgentId, _AgentView] = {}
        self._top = RunView(
            renderer, run_id, client_id, self._show_agents, shows_prompts=shows_prompts
        )

    @property
    def agents(self) -> int:
        """The number of agents that have worked for the run."""
        return len(self._agents)

    def show(self, _: Mirror) -> bool:
        """Show new parts; return True if the run is held or the tree no longer has it."""
        is_over = self._top.show(self._tree)
        self._show_agents()
        return is_over

    def show_all(self) -> None:
        self._top.show_all(self._tree)
        self._show_agents()

    def running_agents(self) -> list[Agent]:
        """The agents that keep running after the end of the run."""
        return [branch.agent for branch in self._tree.branches.values()]

    def _show_agents(self) -> None:
        # Showing one agent may show others in between, before a result that depends on them.
        while self._tree.touched:
            session_id = next(iter(self._tree.touched))
            del self._tree.touched[session_id]
            branch = self._tree.branches[session_id]
            self._show_agent(branch)
            if branch.agent.state == "ended" and session_id not in self._tree.touched:
                self._tree.drop(session_id)

    def _show_agent(self, branch: AgentBranch) -> None:
        agent = branch.agent
        shown = self._agents.get(agent.agent_id)
        if shown is None:
            renderer = self._renderer.agent(agent)
            view = RunView(renderer, None, self._client_id, self._show_agents)
            shown = self._agents[agent.agent_id] = _AgentView(renderer, view)
        if not shown.is_running:
            shown.is_running = True
            shown.renderer.started(agent)
        shown.view.show_all(branch.mirror)
        if agent.state == "ended":
            shown.is_running = False
            shown.renderer.ended(agent)
