"""Agents with a git worktree of their own: what they change is on their branch and nowhere else."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from culm.settings import Settings
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ScriptedCall
from culm.wire.codec import Json
from tests.flow.agents_lives import open_lives
from tests.flow.agents_stage import (
    AgentStage,
    calls,
    held,
    open_again,
    open_agents,
    script_of,
    start,
    talk,
)
from tests.flow.written import provider
from tests.support import contract

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t")
ALLOWED = {"permissions": {"allowed_tools": ["write"]}}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def make_repository(folder: Path) -> Path:
    project = folder / "project"
    project.mkdir()
    git(project, "init", "-q", "-b", "main")
    (project / "a.txt").write_text("A")
    git(project, "add", "a.txt")
    git(project, "commit", "-q", "-m", "first")
    return project


def left(project: Path) -> list[str]:
    """What there is of worktrees: branches, entries of git, directories with their notes."""
    branches = git(project, "for-each-ref", "--format=%(refname:short)", "refs/heads/culm")
    entries = [str(entry) for entry in project.glob(".git/worktrees/*")]
    folders = project.parent.glob("data/projects/*/worktrees/*")
    return [*branches.split(), *entries, *map(str, folders)]


async def assert_swept(stage: AgentStage, project: Path, who: str) -> None:
    """Wait until an agent has no worktree any more, of which nothing is left."""
    gone = await stage.when(who, lambda one: not one.worktree)
    assert (gone.state, gone.branch) == ("ended", "")
    assert left(project) == []


@contract("EXC-22")
async def test_what_an_agent_changes_in_its_worktree_is_on_its_branch_and_nowhere_else(
    tmp_path: Path,
) -> None:
    project = make_repository(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: write", "@bob: look", worktree=True), then="Over."),
        talk("@ann", calls("write", file_path="b.txt", content="B"), then="I wrote it."),
        talk("@bob", calls("view", file_path="a.txt"), then="I looked."),
        config=ALLOWED,
    ) as stage:
        await stage.talk("@lead: go")
        ann, bob = await stage.agent("@ann"), await stage.agent("@bob")
        (result,) = await stage.results()
        assert (Path(ann.worktree) / "b.txt").read_text() == "B"
        assert ann.branch in result.content
        assert not (project / "b.txt").exists()
        assert git(project, "status", "--porcelain") == ""
        assert (bob.worktree, bob.branch) == ("", ""), "it has changed nothing"
        assert len(git(project, "worktree", "list").splitlines()) == 2
        # Ann goes on where she was, and bob gets another one.
        writes = calls("write", file_path="c.txt", content="C")
        stage.play(talk("@ann", writes), talk("@bob", writes))
        for one in (ann, bob):
            await stage.do(one.agent_id, "message", text="more")
        await stage.until_idle()
        again = [await stage.agent("@ann"), await stage.agent("@bob")]
        assert [(Path(one.worktree) / "c.txt").read_text() for one in again] == ["C", "C"]
        assert again[0].worktree == ann.worktree
        assert not (project / "c.txt").exists()


async def test_those_below_an_agent_with_a_worktree_work_in_it(tmp_path: Path) -> None:
    project = make_repository(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True)),
        talk("@ann", calls("write", file_path="b.txt", content="B"), start("@bob: go")),
        talk("@bob", calls("view", file_path="b.txt"), calls("write", file_path="c", content="C")),
        config=ALLOWED,
    ) as stage:
        await stage.talk("@lead: go")
        ann = await stage.agent("@ann")
        assert [result.is_error for result in await stage.results("@bob")] == [False, False]
        assert (Path(ann.worktree) / "c").read_text() == "C"
        assert git(project, "status", "--porcelain") == ""


async def test_what_an_agent_does_in_a_repository_inside_the_repository_is_not_lost(
    tmp_path: Path,
) -> None:
    """To git the directory of such a one is never changed; so there is no worktree."""
    project = make_repository(tmp_path)
    inner = project / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    git(inner, "commit", "-q", "--allow-empty", "-m", "inside")
    git(project, "add", "inner")
    git(project, "commit", "-q", "-m", "with another inside")
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go", worktree=True)), talk("@ann"), config=ALLOWED
    ) as stage:
        await stage.talk("@lead: go")
        (result,) = await stage.results()
        assert result.is_error
        assert f"{project} has submodules, which a worktree would lack" in result.content
        assert (await stage.agents(), left(project)) == ([], [])


@pytest.mark.parametrize("role", ["worker", "explorer"])
async def test_whoever_may_only_read_has_no_worktree_made(tmp_path: Path, role: str) -> None:
    project = make_repository(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", read_only=True)),
        talk("@ann", start("@bob: go", role=role, worktree=True)),
    ) as stage:
        await stage.talk("@lead: go")
        (result,) = await stage.results("@ann")
        assert (result.is_error, "may only read gets no worktree" in result.content) == (True, True)
        assert [one.name for one in await stage.agents()] == ["@ann: go"]
        assert left(project) == []


# --- ends of all kinds


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_the_worktree_of_an_agent_that_ends_before_it_could_work_goes(
    tmp_path: Path, how: str
) -> None:
    project = make_repository(tmp_path)
    one = Settings(agents_at_once=1)
    limits = {"wall_s": 50.0}
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False), start("@bob: go", wait=False, worktree=True)),
        talk("@ann", held()),
        settings=one,
    ) as stage:
        await stage.talk("@lead: go")
        bob = await stage.when("@bob", lambda one: one.waiting_for == "slot")
        assert len(left(project)) == 4
        if how == "cancelled":
            await stage.done(bob.agent_id, "cancel")
        else:
            await stage.done(bob.agent_id, "budget", **limits)
            stage.clock.advance(51)
        await assert_swept(stage, project, "@bob")
        await stage.cancel()


async def test_the_worktree_of_an_agent_that_was_held_and_is_dropped_goes(tmp_path: Path) -> None:
    project = make_repository(tmp_path)
    one = Settings(agents_at_once=1, away_s_max=1)
    async with open_lives(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", start("@bob: go", wait=False), start("@cat: go", wait=False), then="Ann."),
        talk("@bob", held()),
    ) as lives:
        async with lives.next(one) as first:
            await first.talk("@lead: go")
            await first.when("@cat", lambda one: one.waiting_for == "slot")
            lives.kill()
        async with lives.next(one) as stage:
            bob, cat = await stage.agent("@bob"), await stage.agent("@cat")
            assert (bob.outcome, cat.state) == ("interrupted", "pending")
            assert len(left(project)) == 4, "cat is to work there"
            assert (await stage.request("POST", f"/runs/{cat.run_id}/drop")).status == 200
            await assert_swept(stage, project, "@ann")


async def test_the_worktree_of_an_agent_whose_model_cannot_be_asked_goes_and_its_result_says_so(
    tmp_path: Path,
) -> None:
    project = make_repository(tmp_path)
    play = script_of(talk("@lead", start("@ann: go", worktree=True, model="keyless/demo-1")))
    async with open_model_server(play) as model:
        keyless = provider(model.url, "$(exit 1)")
        config = {"providers": {"demo": provider(model.url), "keyless": keyless}}
        async with open_again(tmp_path, model, config=config) as stage:
            await stage.talk("@lead: go")
            (result,) = await stage.results()
            assert "Nothing was changed in its worktree, which is removed." in result.content
            assert await stage.outcomes() == {"@ann:": "error"}
            await assert_swept(stage, project, "@ann")


@pytest.mark.parametrize("how", ["ends", "killed"])
async def test_a_worktree_goes_with_the_last_who_works_in_it(tmp_path: Path, how: str) -> None:
    project = make_repository(tmp_path)
    async with open_lives(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", start("@bob: go", wait=False), then="Ann."),
        talk("@bob", held("Bob.")),
    ) as lives:
        async with lives.next() as stage:
            await stage.talk("@lead: go")
            seen = await stage.asked_by("@bob")
            (result,) = await stage.results()
            assert "Others still work in its worktree" in result.content
            if how == "ends":
                stage.release(seen)
                await assert_swept(stage, project, "@ann")
            lives.kill()
        async with lives.next() as stage:
            assert (await stage.agent("@ann")).outcome == "completed"
            await assert_swept(stage, project, "@ann")


async def test_a_worktree_in_which_one_below_has_worked_on_is_kept(tmp_path: Path) -> None:
    project = make_repository(tmp_path)
    write = ScriptedCall(name="write", input={"file_path": "b.txt", "content": "B"})
    play = script_of(
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", start("@bob: go", wait=False), then="Ann."),
        talk("@bob", held("", calls=[write])),
    )
    async with open_model_server(play) as model:
        async with open_again(tmp_path, model, config=ALLOWED) as stage:
            await stage.talk("@lead: go")
            stage.release(await stage.asked_by("@bob"))
            await stage.until_idle()
        async with open_again(tmp_path, model, session_id=stage.session_id) as again:
            # What was begun at the start is over when this one is.
            bob = await again.start_agent("@bob: look", worktree=True)
            await again.when("@bob: look", lambda one: one.outcome == "completed")
            assert (await again.details(bob.agent_id)).agent.worktree == ""
            ann = await again.agent("@ann")
            assert (Path(ann.worktree) / "b.txt").read_text() == "B"
            assert len(left(project)) == 4


# --- what holds there

SECRET = "TOPSECRET"
DENY = {"decision": "deny", "path": "secrets/**"}
VIEW = {"decision": "allow", "tool": "view"}
DENIED = "Not allowed: a rule denies it: deny path secrets/**."


def views(path: Path) -> Reply:
    return calls("view", file_path=str(path))


def make_secret(folder: Path) -> tuple[Path, Path]:
    """A repository, and a file in it that is in every worktree, too."""
    project = make_repository(folder)
    secret = project / "secrets" / "key"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    git(project, "add", "secrets/key")
    git(project, "commit", "-q", "-m", "second")
    return project, secret


@pytest.mark.parametrize(
    ("config", "more", "skips"),
    [
        ({"permission_rules": [DENY]}, {"approve": "allow"}, False),
        ({"permission_rules": [DENY]}, {"approve": [VIEW]}, False),
        ({"permission_rules": [DENY, VIEW]}, {}, False),
        ({"permission_rules": [DENY], "permissions": {"allowed_tools": ["view"]}}, {}, False),
        ({"permission_rules": [DENY]}, {}, True),
    ],
    ids=["approve", "approve-rules", "rules", "allowed-tools", "skip"],
)
async def test_what_rules_deny_in_the_workspace_no_worktree_lets_an_agent_do_there(
    tmp_path: Path, config: Mapping[str, object], more: dict[str, Json], *, skips: bool
) -> None:
    _, secret = make_secret(tmp_path)
    reads = (views(secret), calls("bash", command=f"cat {secret}", description="Reads."))
    inside = calls("view", file_path="secrets/key")
    async with open_agents(
        tmp_path,
        talk("@lead", *reads, start("@ann: go", worktree=True), then="Over."),
        talk("@ann", *reads, inside, start("@bob: go")),
        talk("@bob", *reads, inside),
        config=config,
    ) as stage:
        if skips:
            skip = {"skip": True, "session_id": stage.session_id}
            assert (await stage.request("POST", "/permissions/skip", skip)).status == 200
        await stage.heard.complete(await stage.prompt("@lead: go", **more))
        for who, refused in (("", 2), ("@ann", 3), ("@bob", 3)):
            said = [result.content for result in await stage.results(who)]
            assert said[:refused] == [DENIED] * refused, who


async def test_what_the_caller_of_a_run_denies_in_the_workspace_is_denied_from_a_worktree(
    tmp_path: Path,
) -> None:
    _, secret = make_secret(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", views(secret)),
    ) as stage:
        await stage.heard.complete(await stage.prompt("@lead: go", approve=[DENY, VIEW]))
        (result,) = await stage.results("@ann")
        said = "Not allowed: whoever started this run denies it: deny path secrets/**."
        assert result.content == said


async def test_what_rules_deny_an_agent_in_its_worktree_they_deny_those_below_it_with_another(
    tmp_path: Path,
) -> None:
    """Down to the third: each is refused it in the workspace, and where all above it work."""
    project, _ = make_secret(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", start("@bob: go", worktree=True)),
        talk("@bob", held("", calls=start("@cat: go", worktree=True).calls)),
        config={"permission_rules": [DENY], "permissions": {"allowed_tools": ["view"]}},
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        asked = await stage.asked_by("@bob")
        above = [Path((await stage.agent(who)).worktree) for who in ("@ann", "@bob")]
        secrets = [place / "secrets" / "key" for place in (project, *above)]
        assert [secret.read_text() for secret in secrets] == [SECRET] * 3
        inside = calls("view", file_path="secrets/key")
        stage.play(
            *map(talk, ("@lead", "@ann", "@bob")), talk("@cat", *map(views, secrets), inside)
        )
        stage.release(asked)
        await stage.heard.complete(run_id)
        assert [one.content for one in await stage.results("@cat")] == [DENIED] * 4
