"""What once went wrong with agents and their mail in real processes, and how it ends now."""

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
from tests.flow.agents_stage import calls, held, script_of, start, talk
from tests.live.agents_desk import FOLDER, AgentDesk, at_work, open_desk
from tests.live.harness import RESUME_S, make_directory
from tests.support import contract

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t")


def mailbox(folder: Path, session_id: str) -> Path:
    project = make_directory(folder, FOLDER)
    return project_folder(folder / "data", project) / "mailboxes" / session_id


def put(box: Path, letter_id: str) -> str:
    """A letter into a mailbox, by hand, as any program of the user can. The name of its file."""
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


async def send(desk: AgentDesk, letter: SendLetter, state: str = "admitted") -> str:
    """The id of a letter, once it has come so far; or of one whose run is `queued`."""
    letter_id = (await desk.remote.send_letter(letter)).letter_id

    async def is_so() -> bool:
        if state == "queued":
            return (await desk.remote.letter(letter_id)).state == "delivered" and (
                await is_run(desk, letter_id, state)
            )
        return (await desk.remote.letter(letter_id)).state == state

    await until(is_so)
    return letter_id


async def is_run(desk: AgentDesk, run_id: str, state: str) -> bool:
    try:
        return (await desk.remote.run(run_id)).state == state
    except RequestRefused:
        return False  # It is not accepted yet.


async def heard(desk: AgentDesk, session_id: SessionId, words: str) -> int:
    """How often this was said there."""
    said = await desk.remote.messages(session_id)
    return sum(words in full_text(one.parts) for one in said if one.role == "user")


async def test_a_letter_with_the_id_of_anothers_letter_or_run_is_dead_and_not_taken_for_read(
    folder: Path,
) -> None:
    play = script_of(talk("@lead", held()), talk("Letter"))
    async with open_model_server(play) as model, open_desk(folder, model) as desk:
        sessions = [(await desk.remote.create_session(title)).id for title in ("a", "b")]
        boxes = [mailbox(folder, one) for one in sessions]
        for one in sessions:
            await send(desk, SendLetter(to=one, text="so that there is a mailbox"))
        await desk.prompt("@lead: go", "run")
        await desk.prompt("@lead: and then", "second")
        of_run = put(boxes[0], "second")
        twin = {put(box, "twin") for box in boxes}.pop()
        await desk.remote.client.request("POST", desk.remote.path("/mail/ring"), Ring())

        async def are_taken() -> bool:
            return not any([*box.glob("new/*"), *box.glob("cur/*")] for box in boxes)

        await until(are_taken)
        model.release()
        await desk.watch.until_complete("second", wait_s=RESUME_S)
        dead = [file.name for box in boxes for file in box.glob("dead/*")]
        assert sorted(dead) == sorted([of_run, twin])
        assert sum([await heard(desk, one, "put here by hand") for one in sessions]) == 1
        assert (await desk.remote.run("second")).session_id == desk.session_id


@contract("FLEET-71")
async def test_what_comes_by_mail_keeps_to_the_budget_is_told_if_it_dies_and_outlives_a_kill(
    folder: Path,
) -> None:
    play = script_of(
        talk("@lead", *[held()] * 2),
        *[talk("@ann", *[calls("agent_list")] * 9), talk("Letter")],
    )
    async with open_model_server(play) as model:
        async with open_desk(folder, model) as desk:
            wish = StartAgent(prompt="@ann: go", limits=Limits(steps=1))
            ann = await desk.remote.start_agent(wish)
            await desk.when(lambda agents: agents["@ann"].outcome == "budget")
            letter = await send(desk, SendLetter(to=ann.agent_id, text="go on"))
            await until(lambda: is_run(desk, letter, "ended"))
            run = await desk.remote.run(letter)
            assert (run.outcome, run.steps) == ("budget", 1)
            # Somebody asks, and what was to read it is cancelled before.
            asker = (await desk.remote.create_session("asker")).id
            await desk.prompt("@lead: go", "first")
            ask = SendLetter(to=desk.session_id, kind="ask", text="why?", from_=asker)
            asked = await send(desk, ask, "queued")
            await desk.remote.cancel(desk.session_id)

            async def is_told() -> bool:
                return await heard(desk, asker, "It was not answered: it was cancelled") == 1

            await until(is_told)
            assert (await desk.remote.letter(asked)).state == "dead"
            # The server is killed, and nobody is there to start what waited behind a run.
            await desk.prompt("@lead: again", "killed")
            letter = await send(desk, SendLetter(to=desk.session_id, text="read me"), "queued")
            await desk.server.kill()
        async with open_desk(folder, model, desk.session_id) as again:
            await until(lambda: is_run(again, letter, "ended"))
            assert (await again.remote.letter(letter)).state == "admitted"
            assert await heard(again, desk.session_id, "read me") == 1
            await again.assert_truthful()


def repository(folder: Path) -> Callable[..., list[str]]:
    """Make the project one with a commit; returns git in it."""
    project = make_directory(folder, FOLDER)

    def git(*words: str) -> list[str]:
        done = subprocess.run([*GIT, *words], cwd=project, check=True, stdout=subprocess.PIPE)
        return done.stdout.decode().splitlines()

    git("init", "-q", "-b", "main")
    git("commit", "-q", "-m", "first", "--allow-empty")
    return git


async def test_the_worktree_of_an_agent_that_is_cancelled_goes_and_none_is_made_elsewhere(
    folder: Path,
) -> None:
    git = repository(folder)
    play = script_of(talk("@ann", held()))
    async with open_model_server(play) as model, open_desk(folder, model) as desk:
        wish = StartAgent(prompt="@ann: go", worktree=True)
        git("config", "core.worktree", str(make_directory(folder, "elsewhere")))
        with pytest.raises(RequestRefused, match="elsewhere"):
            await desk.remote.start_agent(wish)
        git("config", "--unset", "core.worktree")
        assert (await desk.agents(), len(git("worktree", "list"))) == ({}, 1)
        await desk.remote.start_agent(wish)
        agents = await desk.when(at_work("@ann"))
        assert len(git("worktree", "list")) == 2
        assert (await desk.remote.cancel_agent(agents["@ann"].agent_id)).outcome == "canceled"
        await desk.when(lambda agents: not agents["@ann"].worktree)
        assert (len(git("worktree", "list")), git("branch")) == (1, ["* main"])


async def test_worktrees_that_a_killed_server_had_made_for_nobody_yet_are_removed(
    folder: Path,
) -> None:
    git = repository(folder)
    worktrees = project_folder(folder / "data", make_directory(folder, FOLDER)) / "worktrees"
    prompts = [f"@w{number:02}: go" for number in range(40)]
    play = script_of(talk("@lead", start(*prompts, worktree=True), then="Over."), talk("@w"))

    async def has_some() -> bool:
        return len(git("worktree", "list")) > 6

    async def has_none() -> bool:
        return (len(git("worktree", "list")), git("branch")) == (1, ["* main"])

    async with open_model_server(play) as model:
        async with open_desk(folder, model) as desk:
            await desk.prompt("@lead: go", "killed")
            await until(has_some)
            await desk.server.kill()
        assert not await has_none()
        async with open_desk(folder, model, desk.session_id) as again:
            await until(has_none)
            await until(lambda: asyncio.to_thread(lambda: not list(worktrees.iterdir())))
            assert await again.agents() == {}
