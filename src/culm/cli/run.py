"""`culm run`: one prompt to the user's server, the answer on stdout, all else on stderr.

Owns what a person or a script sees of one run, and what a signal does to it. The run is the
server's: it goes on if this process is killed.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import click

from culm.cli.call_lines import head_of
from culm.cli.desk import Desk, Lines, Terminal
from culm.cli.exits import EXIT_CANCELED, EXIT_FAILED
from culm.cli.faces import Face, Plain
from culm.cli.json_lines import JsonLines
from culm.cli.place import Where
from culm.cli.server import in_words
from culm.cli.shown import TreeShown
from culm.cli.signals import cancelling
from culm.cli.streams import CannotWrite, let_go
from culm.client.connect import open_connected
from culm.client.http import Refused
from culm.client.launch import Starter
from culm.client.stream import Follower, Mirror
from culm.client.tree import Tree, open_tree
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed, InvalidRequest, NotFound, RunNotFound, SessionNotFound
from culm.ids import Ids, MessageId, SessionId
from culm.wire.config import ProviderConfig, SelectedModel
from culm.wire.messages import (
    Message,
    full_text,
    is_finished,
)
from culm.wire.rules import Approve
from culm.wire.runs import Run
from culm.wire.sessions import Session

EXITS = {"end_turn": 0, "canceled": EXIT_CANCELED}

CONNECT_S = 10.0  # To an event stream of a server that has just answered.
AGAIN_S = 0.05
LOOK_S = 2.0  # A server that died says nothing, so it is asked as often as this.
GONE_S = 8.0  # Somebody who restarts it has done so by then, on a busy machine too.
CATCH_UP_S = 2.0  # What is stored has been told; it may still be on its way.
CANCEL_S = 10.0  # The server itself gives up on what does not stop after 5 s.
TITLE_CHARS = 50


@dataclass(frozen=True, slots=True)
class RunOptions:
    prompt: str
    where: Where
    session: str = ""  # An id; nothing for a new one ...
    latest: bool = False  # ... or for the one that was used last.
    model: str = ""
    as_json: bool = False
    approve: Approve | None = None
    interactive: bool = False  # A person is at this terminal, and can be asked.


def run_prompt(options: RunOptions, starter: Starter) -> int:
    """Run to the end and return the exit status; raises `AppError`. The start may have begun."""
    has_rules = options.approve is not None
    plain = Plain(has_rules=has_rules)
    face = JsonLines() if options.as_json else plain
    lines = Terminal(plain) if options.interactive else None
    try:
        with asyncio.Runner() as runner:
            return runner.run(_Asking(options, face, lines).run(starter))
    except asyncio.CancelledError:
        click.echo("culm: cancelled, nothing was asked", err=True)
        return EXIT_CANCELED
    except CannotWrite as exc:
        return let_go(exc, "the run goes on")
    except (Refused, OSError) as exc:
        raise in_words(exc, options.where.server.url) from exc


# --- what is written


def choose_model(text: str, providers: Mapping[str, ProviderConfig]) -> SelectedModel:
    """PROVIDER/MODEL, or a MODEL that one provider alone has; raises `InvalidRequest`."""
    usable = {name: one for name, one in providers.items() if not one.disable}
    provider, _, model = text.partition("/")
    if provider in usable and model:
        return SelectedModel(model=model, provider=provider)
    owners = [name for name, one in usable.items() if text in {m.id for m in one.models}]
    if len(owners) == 1:
        return SelectedModel(model=text, provider=owners[0])
    if owners:
        hint = "say " + " or ".join(f"{name}/{text}" for name in owners)
        raise InvalidRequest(f"more than one provider has the model {text}", hint=hint)
    known = [f"{name}/{model.id}" for name, one in usable.items() for model in one.models]
    hint = f"there is {', '.join(known[:5])}" if known else "docs/models.md tells how to add one"
    raise InvalidRequest(f"no provider has a model {text}", hint=hint)


def title_of(prompt: str) -> str:
    """What a session is called until a model has named it."""
    words = " ".join(prompt[: 4 * TITLE_CHARS].split())
    return words if len(words) <= TITLE_CHARS else words[: TITLE_CHARS - 1] + "…"


class _Asking:
    """One prompt on its way, from a server that may still be starting to the end of the run."""

    def __init__(self, options: RunOptions, face: Face, lines: Lines | None) -> None:
        self._options = options
        self._face = face
        self._lines = lines  # None if nobody can be asked here.
        self._run_id = Ids().run()
        self._asked = False  # From here on a signal is for the run.
        self._interrupted = asyncio.Event()

    async def run(self, starter: Starter) -> int:
        options = self._options
        task = asyncio.current_task()
        assert task is not None, "this runs in a task"

        def cancel() -> None:
            self._interrupted.set()
            if not self._asked:
                task.cancel()

        with cancelling(asyncio.get_running_loop(), cancel):
            try:
                async with open_connected(starter, options.where.token_file) as client:
                    return await self._ask(await client.open_workspace(options.where.directory))
            except ExceptionGroup as exc:
                raise exc.exceptions[0] from exc

    async def _ask(self, workspace: RemoteWorkspace) -> int:
        options = self._options
        providers = workspace.info.config.providers
        model = choose_model(options.model, providers) if options.model else None
        for notice in workspace.info.notices:
            self._face.note(f"notice: {notice}")
        session = await self._session(workspace)
        interactive = options.interactive
        following = open_tree(workspace, session.id, self._run_id, interactive=interactive)
        async with following as (follower, tree):
            async with asyncio.timeout(CONNECT_S):
                await follower.connected()
            shown = TreeShown(self._face, self._run_id, tree, workspace.client.id)
            self._asked = True
            await workspace.prompt(
                session.id,
                options.prompt,
                run_id=self._run_id,
                model=model,
                interactive=interactive,
                approve=options.approve,
            )
            run = await self._to_the_end(workspace, follower, tree, shown)
            if run is None:
                self._face.note(f"culm: asked to cancel; no end was told in {CANCEL_S:g} s")
                return EXIT_CANCELED
            last = await self._catch_up(workspace, follower, run)
            shown.show_all()
            for agent in shown.at_work():
                stop = f"`culm stop {agent.agent_id}` stops it"
                self._face.note(f"({head_of(agent.name)} goes on; {stop})")
            self._face.end(run, full_text(last.parts) if last is not None else "", shown.agents)
            # Who lets go at once closes the workspace, and a model may still be naming the session.
            known = tree.sessions.get(session.id)
            is_named = known is None or known.title != title_of(options.prompt)
        if is_named or run.outcome != "end_turn":
            await workspace.client.leave()
        return EXITS.get(run.outcome or "", EXIT_FAILED)

    async def _session(self, workspace: RemoteWorkspace) -> Session:
        if self._options.session:
            return await self._get_session(workspace)
        if not self._options.latest:
            return await workspace.create_session(title_of(self._options.prompt))
        sessions = await workspace.sessions()
        if not sessions:
            raise NotFound("there is no session to continue", hint="leave out --continue")
        return sessions[0]

    async def _get_session(self, workspace: RemoteWorkspace) -> Session:
        try:
            return await workspace.session(SessionId(self._options.session))
        except Refused as exc:
            if exc.code != SessionNotFound.code:
                raise
            hint = "`culm agents` lists the sessions of this directory"
            raise NotFound(exc.message, hint=hint) from exc

    async def _to_the_end(
        self, workspace: RemoteWorkspace, follower: Follower, tree: Tree, shown: TreeShown
    ) -> Run | None:
        """None if it was told to stop and nobody said that it did."""
        try:
            async with asyncio.timeout(None) as bound, asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._cancel(workspace, bound), name="cancel")]
                if self._lines is not None:
                    desk = Desk(workspace, follower, tree, self._face, self._lines)
                    beside.append(tasks.create_task(desk.serve(), name="desk"))
                run = await self._follow(workspace, follower, shown)
                for task in beside:
                    task.cancel()
        except TimeoutError:
            return None
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from exc
        return run

    async def _cancel(self, workspace: RemoteWorkspace, bound: asyncio.Timeout) -> None:
        await self._interrupted.wait()
        bound.reschedule(asyncio.get_running_loop().time() + CANCEL_S)
        self._face.note("(cancelling; once more to leave at once)")
        with suppress(Refused, OSError):  # What came of it is told by the run itself.
            await workspace.cancel_run(self._run_id)

    async def _follow(
        self, workspace: RemoteWorkspace, follower: Follower, shown: TreeShown
    ) -> Run:
        """Show the run until it is over; raises `Failed` if the server is gone."""
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await follower.until(shown.show)
            run = await self._find_run(workspace)
            if run is not None and run.state in ("ended", "held"):
                return run
            if run is not None:
                heard_s = loop.time()
            elif loop.time() - heard_s > GONE_S:
                url = self._options.where.server.url
                raise Failed(
                    f"the server at {url} has gone in the middle of the run",
                    hint="`culm run --continue 'go on'` goes on in the same session",
                )
            await asyncio.sleep(AGAIN_S)

    async def _find_run(self, workspace: RemoteWorkspace) -> Run | None:
        """How the run stands; None while nobody says. Raises `Refused` if it was removed."""
        try:
            async with asyncio.timeout(GONE_S):
                return await workspace.run(self._run_id)
        except OSError:
            return None
        except Refused as exc:
            if exc.code == RunNotFound.code:  # With its session.
                raise
        # The server restarted. The stream joins the workspace again, but may sleep for long.
        with suppress(Refused, OSError):
            await workspace.rejoin()
        return None

    async def _catch_up(
        self, workspace: RemoteWorkspace, follower: Follower, run: Run
    ) -> Message | None:
        """The run's last answer, once the mirror has all of it and of the run."""
        message_id = MessageId(run.message_id)

        def is_whole(mirror: Mirror) -> bool:
            if run.id in mirror.runs and run.state != "held":
                return False  # Those who worked for it have ended before it.
            found = mirror.messages.get(message_id)
            return not message_id or (found is not None and is_finished(found.parts))

        try:
            async with asyncio.timeout(CATCH_UP_S):
                await follower.until(is_whole)
        except TimeoutError:
            if not message_id:
                return None
            if (stored := await workspace.find_message(run.session_id, message_id)) is not None:
                follower.mirror.put_message(stored)
        return follower.mirror.messages.get(message_id)
