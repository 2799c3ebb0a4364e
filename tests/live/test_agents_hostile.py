"""Regression tests for agents and their mail in real processes."""

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from culm.client.http import RequestRefused
from culm.ids import LetterId, SessionId
from culm.mail.letters import Letter, Sender, body_of, encode_letter
from culm.testing.model_server import open_model_server
from culm.wire.agents import Ring, SendLetter, StartAgent
from culm.wire.messages import full_text
from culm.wire.runs import Limits
from culm.workspace.roots import project_folder
from tests.flow.agents_harness import calls, held, script_of, start, talk
from tests.live.agents_harness import FOLDER, AgentsHarness, at_work, open_agents_harness
from tests.live.harness import RESUME_S, make_directory
from tests.support import contract

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t")


def mailbox(folder: Path, session_id: str) -> Path:
    project = make_directory(folder, FOLDER)
    return project_folder(folder / "data", project) / "mailboxes" / session_id


def put(box: Path, letter_id: str) -> str:
    """Write a letter into a mailbox as any program can; return the name of its file."""
    letter = Letter(
        id=LetterId(letter_id),
        from_=Sender(session_id="person"),
        kind="task",
        body=body_of("task", "put here by hand"),
        created_at="2026-05-04T09:30:00Z",
    )
    name = f"{1:020}-{letter_id}.json"
    (box / "tmp" / name).write_bytes(encode_letter(letter))
    (box / "tmp" / name).rename(box / "new" / name)
    return name


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(RESUME_S):
        while not await look():
            await asyncio.sleep(0.02)


async def send(harness: AgentsHarness, letter: SendLetter, state: str = "admitted") -> str:
    """Send a letter and wait until it, or its run if `queued`, has the state; return its id."""
    letter_id = (await harness.remote.send_letter(letter)).letter_id

    async def has_state() -> bool:
        if state == "queued":
            return (await harness.remote.letter(letter_id)).state == "delivered" and (
                await is_run(harness, letter_id, state)
            )
        return (await harness.remote.letter(letter_id)).state == state

    await until(has_state)
    return letter_id


async def is_run(harness: AgentsHarness, run_id: str, state: str) -> bool:
    try:
        return (await harness.remote.run(run_id)).state == state
    except RequestRefused:
        return False  # It is not accepted yet.


async def count_in(harness: AgentsHarness, session_id: SessionId, text: str) -> int:
    """Count the user messages of a session that contain the text."""
    messages = await harness.remote.messages(session_id)
    return sum(text in full_text(one.parts) for one in messages if one.role == "user")


async def test_letter_with_the_id_of_another_letter_or_run_goes_to_dead(
    folder: Path,
) -> None:
    play = script_of(talk("@lead", held()), talk("Letter"))
    async with open_model_server(play) as model, open_agents_harness(folder, model) as harness:
        sessions = [(await harness.remote.create_session(title)).id for title in ("a", "b")]
        boxes = [mailbox(folder, one) for one in sessions]
        for one in sessions:
            await send(harness, SendLetter(to=one, text="so that there is a mailbox"))
        await harness.prompt("@lead: go", "run")
        await harness.prompt("@lead: and then", "second")
        of_run = put(boxes[0], "second")
        twin = {put(box, "twin") for box in boxes}.pop()
        await harness.remote.client.request("POST", harness.remote.path("/mail/ring"), Ring())

        async def are_processed() -> bool:
            return not any([*box.glob("new/*"), *box.glob("cur/*")] for box in boxes)

        await until(are_processed)
        model.release()
        await harness.watch.until_complete("second", wait_s=RESUME_S)
        dead = [file.name for box in boxes for file in box.glob("dead/*")]
        assert sorted(dead) == sorted([of_run, twin])
        assert sum([await count_in(harness, one, "put here by hand") for one in sessions]) == 1
        assert (await harness.remote.run("second")).session_id == harness.session_id


@contract("FLEET-71")
async def test_letter_run_obeys_the_budget_reports_a_cancel_and_survives_a_kill(
    folder: Path,
) -> None:
    play = script_of(
        talk("@lead", *[held()] * 2),
        *[talk("@ann", *[calls("agent_list")] * 9), talk("Letter")],
    )
    async with open_model_server(play) as model:
        async with open_agents_harness(folder, model) as harness:
            wish = StartAgent(prompt="@ann: go", limits=Limits(steps=1))
            ann = await harness.remote.start_agent(wish)
            await harness.until(lambda agents: agents["@ann"].outcome == "budget")
            letter = await send(harness, SendLetter(to=ann.agent_id, text="go on"))
            await until(lambda: is_run(harness, letter, "ended"))
            run = await harness.remote.run(letter)
            assert (run.outcome, run.steps) == ("budget", 1)
            # A letter asks, and its run is canceled before it reads it.
            asker = (await harness.remote.create_session("asker")).id
            await harness.prompt("@lead: go", "first")
            ask = SendLetter(to=harness.session_id, kind="ask", text="why?", from_=asker)
            asked = await send(harness, ask, "queued")
            await harness.remote.cancel(harness.session_id)

            async def is_reported() -> bool:
                return await count_in(harness, asker, "It was not answered: it was cancelled") == 1

            await until(is_reported)
            assert (await harness.remote.letter(asked)).state == "dead"
            # The server is killed while a letter is queued behind a run.
            await harness.prompt("@lead: again", "killed")
            letter = await send(
                harness, SendLetter(to=harness.session_id, text="read me"), "queued"
            )
            await harness.server.kill()
        async with open_agents_harness(folder, model, harness.session_id) as again:
            await until(lambda: is_run(again, letter, "ended"))
            assert (await again.remote.letter(letter)).state == "admitted"
            assert await count_in(again, harness.session_id, "read me") == 1
            await again.assert_consistent()


def repository(folder: Path) -> Callable[..., list[str]]:
    """Make the project a repository with a commit; return git in it."""
    project = make_directory(folder, FOLDER)

    def git(*args: str) -> list[str]:
        done = subprocess.run([*GIT, *args], cwd=project, check=True, stdout=subprocess.PIPE)
        return done.stdout.decode().splitlines()

    git("init", "-q", "-b", "main")
    git("commit", "-q", "-m", "first", "--allow-empty")
    return git


async def test_worktree_of_a_canceled_agent_is_removed_and_none_made_elsewhere(
    folder: Path,
) -> None:
    git = repository(folder)
    play = script_of(talk("@ann", held()))
    async with open_model_server(play) as model, open_agents_harness(folder, model) as harness:
        wish = StartAgent(prompt="@ann: go", worktree=True)
        git("config", "core.worktree", str(make_directory(folder, "elsewhere")))
        with pytest.raises(RequestRefused, match="elsewhere"):
            await harness.remote.start_agent(wish)
        git("config", "--unset", "core.worktree")
        assert (await harness.agents(), len(git("worktree", "list"))) == ({}, 1)
        await harness.remote.start_agent(wish)
        agents = await harness.until(at_work("@ann"))
        assert len(git("worktree", "list")) == 2
        assert (await harness.remote.cancel_agent(agents["@ann"].agent_id)).outcome == "canceled"
        await harness.until(lambda agents: not agents["@ann"].worktree)
        assert (len(git("worktree", "list")), git("branch")) == (1, ["* main"])


async def test_unassigned_worktrees_of_a_killed_server_are_removed(
    folder: Path,
) -> None:
    git = repository(folder)
    worktrees = project_folder(folder / "data", make_directory(folder, FOLDER)) / "worktrees"
    prompts = [f"@w{number:02}: go" for number in range(40)]
    play = script_of(talk("@lead", start(*prompts, worktree=True), then="Over."), talk("@w"))

    async def has_some() -> bool:
        return len(git("worktree", "list")) > 6

    async def has_none() -> bool:
        try:
            return (len(git("worktree", "list")), git("branch")) == (1, ["* main"])
        except subprocess.CalledProcessError:
            return False  # A worktree was removed while git read the list of them.

    async with open_model_server(play) as model:
        async with open_agents_harness(folder, model) as harness:
            await harness.prompt("@lead: go", "killed")
            await until(has_some)
            await harness.server.kill()
        assert not await has_none()
        async with open_agents_harness(folder, model, harness.session_id) as again:
            await until(has_none)
            await until(lambda: asyncio.to_thread(lambda: not list(worktrees.iterdir())))
            assert await again.agents() == {}
