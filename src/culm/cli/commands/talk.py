"""`culm` without a command: a prompt, a session, and one run after another.

The client runs in a thread of its own, so that this one can wait for a line. The workspace stays
open meanwhile.
"""

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import click
from msgspec import Struct

from culm.cli.follow_run import PromptRun, RunOptions, RunScreen
from culm.cli.names import find_session, short_ids
from culm.cli.options import ServerTarget
from culm.cli.prompt_options import choose_model, read_attachments
from culm.cli.render.renderers import TextRenderer
from culm.cli.render.text import columns, head_of, without_controls
from culm.cli.server import describe_error
from culm.cli.terminal.approval_prompt import TerminalInput
from culm.cli.terminal.line_editor import (
    KeyListener,
    LineEditor,
    TypedLine,
    parse_line,
    parse_prompt,
)
from culm.cli.terminal.process import (
    CannotWrite,
    cancelling,
    close_output,
    report_error,
    write_note,
)
from culm.cli.terminal.status_area import find_status_area
from culm.client.blocking import Portal, open_portal
from culm.client.connection import open_connected
from culm.client.follower import open_present
from culm.client.http import RequestRefused
from culm.client.launch import ServerStarter
from culm.client.run import title_of
from culm.client.workspace import RemoteWorkspace
from culm.errors import AppError
from culm.ids import SessionId
from culm.settings import default_state_dir
from culm.wire.tools import ToolInfo

SESSIONS_SHOWN = 10
HELP = """\
Type a prompt for the agent. Escape or Ctrl-C stops the run. Permission requests and questions are
answered here, with Enter; Ctrl-C at such a prompt stops the run, too. Text that you type during a
run is kept for the next prompt.
  @path         in a prompt attaches that file; Tab completes the path
  !command      runs a shell command, whose output the agent can see
  /new          starts a new session
  /sessions     lists the latest sessions; /session ID continues one
  /model NAME   switches to that model; without NAME it shows the current one
  /help, /quit  shows this help; leaves, like Ctrl-D
End a line with \\ to continue it on the next one. The arrow keys recall earlier input."""


def talk(where: ServerTarget, starter: ServerStarter) -> int:
    """Run a conversation and return the exit status. Raises `AppError`."""

    @asynccontextmanager
    async def opening() -> AsyncGenerator[RemoteWorkspace]:
        async with open_connected(starter, where.token_file) as client:
            workspace = await client.open_workspace(where.directory)
            # Runs of other clients are not shown, so their asks cannot be answered here.
            async with open_present(workspace):
                yield workspace
            await client.leave()

    history = default_state_dir(os.environ) / "history"
    try:
        with (
            open_portal(opening()) as (portal, workspace),
            LineEditor(where.directory, history) as typing,
        ):
            return Conversation(where, portal, workspace).run(typing)
    except CannotWrite as exc:
        return close_output(exc, "the run continues")
    except (RequestRefused, OSError, ExceptionGroup) as exc:
        raise describe_error(exc, where.server.url) from exc


class TypedAnswers(TerminalInput):
    """Terminal input for answers; the key listener is paused while a line is read."""

    def __init__(self, face: TextRenderer, keys: KeyListener) -> None:
        super().__init__(face)
        self._keys = keys

    async def read(self, prompt: str) -> str:
        with self._keys.paused():
            return await super().read(prompt)


class Conversation(Struct):
    """One conversation at a terminal."""

    where: ServerTarget
    portal: Portal
    workspace: RemoteWorkspace
    session_id: SessionId | None = None  # None before the first prompt of a session.
    model: str = ""
    typed: str = ""  # Keys typed during the last run.

    def run(self, typing: LineEditor) -> int:
        write_note(f"culm in {self.where.directory}; /help lists the commands")
        for notice in self.workspace.info.notices:
            write_note(f"notice: {notice}")
        while True:
            try:
                line = parse_line(typing.read(self._handle_typed()))
            except KeyboardInterrupt:
                click.echo("(press Ctrl-D to leave)", err=True)
                continue
            except EOFError:
                click.echo(err=True)
                return 0
            if line is None:
                click.echo("unknown command; /help lists the commands", err=True)
            elif line.kind == "quit":
                return 0
            else:
                self._try(line)

    def _handle_typed(self) -> str:
        typed, self.typed = self.typed, ""
        return typed

    def _try(self, line: TypedLine) -> None:
        """Do what was typed; an error is reported and the conversation goes on."""
        try:
            self._do(line)
        except KeyboardInterrupt:
            click.echo("(stopped)", err=True)
        except (AppError, RequestRefused, OSError, ExceptionGroup) as exc:
            error = describe_error(exc, self.where.server.url)
            if not isinstance(error, AppError):
                raise error from exc
            report_error(error.message, error.hint)

    def _do(self, line: TypedLine) -> None:
        if line.kind not in ("nothing", "help", "new"):
            self.portal.wait(self._ensure_server())
        match line.kind:
            case "help":
                click.echo(HELP, err=True)
            case "new":
                self.session_id = None
            case "session":
                self.session_id = self.portal.wait(find_session(self.workspace, line.text))
            case "sessions":
                self._list_sessions()
            case "model":
                self._choose_model(line.text)
            case "shell":
                self._shell(line.text)
            case "prompt":
                self._ask(line.text)
            case _:
                pass

    async def _ensure_server(self) -> None:
        """Restart a server that has ended since the last prompt."""
        try:
            await self.workspace.refresh()
        except (RequestRefused, OSError):
            opened = await self.workspace.client.open_workspace(self.where.directory)
            self.workspace.info = opened.info

    def _ask(self, text: str) -> None:
        prompt = parse_prompt(text, self.where.directory)
        for name in prompt.others:
            click.echo(f"({head_of(name)} is not a file; sent as text)", err=True)
        options = RunOptions(
            prompt=prompt.text,
            where=self.where,
            session=self.session_id or "",
            model=self.model,
            attachments=read_attachments(prompt.files),
            interactive=True,
        )
        tools: dict[str, ToolInfo] = {}
        area = find_status_area(sys.stderr, os.environ)
        plain = TextRenderer(tools, status_area=area, has_prompt=True)
        keys = KeyListener(sys.stdin.fileno(), lambda: asking.interrupted.set())
        asking = PromptRun(options, RunScreen(plain, plain, TypedAnswers(plain, keys), tools))

        async def ask() -> None:
            with keys.listening():
                await asking.ask(self.workspace)

        interrupts = cancelling(self.portal.loop, asking.interrupted.set, keys.restore)
        with interrupts, keys.stopping():
            try:
                self.portal.wait(ask())
            finally:
                self.typed = keys.typed()
                self.session_id = asking.session_id or self.session_id

    def _shell(self, command: str) -> None:
        if self.session_id is None:
            session = self.portal.wait(self.workspace.create_session(title_of(command)))
            self.session_id = session.id
        done = self.portal.wait(self.workspace.shell(self.session_id, command))
        click.echo(without_controls(done.output).rstrip("\n"))
        if done.exit_code:
            click.echo(f"(exit status {done.exit_code})", err=True)

    def _list_sessions(self) -> None:
        sessions = self.portal.wait(self.workspace.sessions())
        short = short_ids([one.id for one in sessions])
        rows = [
            ("*" if one.id == self.session_id else " ", short[one.id], head_of(one.title))
            for one in sessions[:SESSIONS_SHOWN]
        ]
        click.echo("\n".join(columns(rows)) if rows else "no sessions yet", err=True)

    def _choose_model(self, name: str) -> None:
        if name:
            chosen = choose_model(name, self.workspace.info.config.providers)
            self.model = f"{chosen.provider}/{chosen.model}"
        elif not self.model:
            chosen = self.portal.wait(self.workspace.agent_info()).model_cfg
            write_note(f"{chosen.provider}/{chosen.model}")
            return
        write_note(self.model)
