"""Agents with their own git worktree and branch."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from culm.settings import Settings
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ScriptedCall
from culm.wire.codec import Json
from tests.flow.agents_harness import (
    AgentHarness,
    calls,
    held,
    open_agent_harness,
    open_agents,
    script_of,
    start,
    talk,
)
from tests.flow.agents_restarts import open_restarts
from tests.flow.config_files import provider
from tests.support import contract

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t")
ALLOWED = {"permissions": {"allowed_tools": ["write"]}}


def git(folder: Path, *args: str) -> str:
    done = subprocess.run([*GIT, *args], cwd=folder, check=True, capture_output=True, text=True)
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
    """All traces of worktrees: branches, git entries, directories with their metadata."""
    branches = git(project, "for-each-ref", "--format=%(refname:short)", "refs/heads/culm")
    entries = [str(entry) for entry in project.glob(".git/worktrees/*")]
    folders = project.parent.glob("data/projects/*/worktrees/*")
    return [*branches.split(), *entries, *map(str, folders)]


async def assert_removed(harness: AgentHarness, project: Path, who: str) -> None:
    """Wait until an agent has no worktree, and check that nothing of it is left."""
    gone = await harness.until_agent(who, lambda one: not one.worktree)
    assert (gone.state, gone.branch) == ("ended", "")
    assert left(project) == []


@contract("EXC-22")
async def test_changes_in_a_worktree_are_only_on_the_agents_branch(
    tmp_path: Path,
) -> None:
    project = make_repository(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: write", "@bob: look", worktree=True), then="Over."),
        talk("@ann", calls("write", file_path="b.txt", content="B"), then="I wrote it."),
        talk("@bob", calls("view", file_path="a.txt"), then="I looked."),
        config=ALLOWED,
    ) as harness:
        await harness.talk("@lead: go")
        ann, bob = await harness.agent("@ann"), await harness.agent("@bob")
        (result,) = await harness.results()
        assert (Path(ann.worktree) / "b.txt").read_text() == "B"
        assert ann.branch in result.content
        assert not (project / "b.txt").exists()
        assert git(project, "status", "--porcelain") == ""
        assert (bob.worktree, bob.branch) == ("", ""), "it has changed nothing"
        assert len(git(project, "worktree", "list").splitlines()) == 2
        # Ann continues in her worktree, and bob gets a new one.
        writes = calls("write", file_path="c.txt", content="C")
        harness.play(talk("@ann", writes), talk("@bob", writes))
        for one in (ann, bob):
            await harness.do(one.agent_id, "message", text="more")
        await harness.until_idle()
        again = [await harness.agent("@ann"), await harness.agent("@bob")]
        assert [(Path(one.worktree) / "c.txt").read_text() for one in again] == ["C", "C"]
        assert again[0].worktree == ann.worktree
        assert not (project / "c.txt").exists()


async def test_children_of_an_agent_with_a_worktree_work_in_it(tmp_path: Path) -> None:
    project = make_repository(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True)),
        talk("@ann", calls("write", file_path="b.txt", content="B"), start("@bob: go")),
        talk("@bob", calls("view", file_path="b.txt"), calls("write", file_path="c", content="C")),
        config=ALLOWED,
    ) as harness:
        await harness.talk("@lead: go")
        ann = await harness.agent("@ann")
        assert [result.is_error for result in await harness.results("@bob")] == [False, False]
        assert (Path(ann.worktree) / "c").read_text() == "C"
        assert git(project, "status", "--porcelain") == ""


async def test_worktree_for_a_repository_with_submodules_is_refused(
    tmp_path: Path,
) -> None:
    """Git would not notice changes inside it, so no worktree is made."""
    project = make_repository(tmp_path)
    inner = project / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    git(inner, "commit", "-q", "--allow-empty", "-m", "inside")
    git(project, "add", "inner")
    git(project, "commit", "-q", "-m", "with another inside")
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go", worktree=True)), talk("@ann"), config=ALLOWED
    ) as harness:
        await harness.talk("@lead: go")
        (result,) = await harness.results()
        assert result.is_error
        assert f"{project} has submodules, which a worktree would lack" in result.content
        assert (await harness.agents(), left(project)) == ([], [])


@pytest.mark.parametrize("role", ["worker", "explorer"])
async def test_worktree_for_a_read_only_agent_is_refused(tmp_path: Path, role: str) -> None:
    project = make_repository(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", read_only=True)),
        talk("@ann", start("@bob: go", role=role, worktree=True)),
    ) as harness:
        await harness.talk("@lead: go")
        (result,) = await harness.results("@ann")
        assert (result.is_error, "may only read gets no worktree" in result.content) == (True, True)
        assert [one.name for one in await harness.agents()] == ["@ann: go"]
        assert left(project) == []


# --- removal


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_worktree_of_an_agent_that_never_started_is_removed(tmp_path: Path, how: str) -> None:
    project = make_repository(tmp_path)
    one = Settings(agents_at_once=1)
    limits = {"wall_s": 50.0}
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False), start("@bob: go", wait=False, worktree=True)),
        talk("@ann", held()),
        settings=one,
    ) as harness:
        await harness.talk("@lead: go")
        bob = await harness.until_agent("@bob", lambda one: one.waiting_for == "slot")
        assert len(left(project)) == 4
        if how == "cancelled":
            await harness.done(bob.agent_id, "cancel")
        else:
            await harness.done(bob.agent_id, "budget", **limits)
            harness.clock.advance(51)
        await assert_removed(harness, project, "@bob")
        await harness.cancel()


async def test_worktree_of_a_held_and_dropped_agent_is_removed(tmp_path: Path) -> None:
    project = make_repository(tmp_path)
    one = Settings(agents_at_once=1, away_s_max=1)
    async with open_restarts(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", start("@bob: go", wait=False), start("@cat: go", wait=False), then="Ann."),
        talk("@bob", held()),
    ) as restarts:
        async with restarts.next(one) as first:
            await first.talk("@lead: go")
            await first.until_agent("@cat", lambda one: one.waiting_for == "slot")
            restarts.kill()
        async with restarts.next(one) as harness:
            bob, cat = await harness.agent("@bob"), await harness.agent("@cat")
            assert (bob.outcome, cat.state) == ("interrupted", "pending")
            assert len(left(project)) == 4, "cat will work there"
            assert (await harness.request("POST", f"/runs/{cat.run_id}/drop")).status == 200
            await assert_removed(harness, project, "@ann")


async def test_worktree_of_an_agent_without_a_usable_model_is_removed(
    tmp_path: Path,
) -> None:
    project = make_repository(tmp_path)
    play = script_of(talk("@lead", start("@ann: go", worktree=True, model="keyless/demo-1")))
    async with open_model_server(play) as model:
        keyless = provider(model.url, "$(exit 1)")
        config = {"providers": {"demo": provider(model.url), "keyless": keyless}}
        async with open_agent_harness(tmp_path, model, config=config) as harness:
            await harness.talk("@lead: go")
            (result,) = await harness.results()
            assert "Nothing was changed in its worktree, which is removed." in result.content
            assert await harness.outcomes() == {"@ann:": "error"}
            await assert_removed(harness, project, "@ann")


@pytest.mark.parametrize("how", ["ends", "killed"])
async def test_worktree_is_removed_after_its_last_agent_ends(tmp_path: Path, how: str) -> None:
    project = make_repository(tmp_path)
    async with open_restarts(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", start("@bob: go", wait=False), then="Ann."),
        talk("@bob", held("Bob.")),
    ) as restarts:
        async with restarts.next() as harness:
            await harness.talk("@lead: go")
            seen = await harness.until_asked_by("@bob")
            (result,) = await harness.results()
            assert "Others still work in its worktree" in result.content
            if how == "ends":
                harness.release(seen)
                await assert_removed(harness, project, "@ann")
            restarts.kill()
        async with restarts.next() as harness:
            assert (await harness.agent("@ann")).outcome == "completed"
            await assert_removed(harness, project, "@ann")


async def test_worktree_changed_by_a_child_is_kept(tmp_path: Path) -> None:
    project = make_repository(tmp_path)
    write = ScriptedCall(name="write", input={"file_path": "b.txt", "content": "B"})
    play = script_of(
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", start("@bob: go", wait=False), then="Ann."),
        talk("@bob", held("", calls=[write])),
    )
    async with open_model_server(play) as model:
        async with open_agent_harness(tmp_path, model, config=ALLOWED) as harness:
            await harness.talk("@lead: go")
            harness.release(await harness.until_asked_by("@bob"))
            await harness.until_idle()
        async with open_agent_harness(tmp_path, model, session_id=harness.session_id) as again:
            # The sweep at startup has finished when this agent has ended.
            bob = await again.start_agent("@bob: look", worktree=True)
            await again.until_agent("@bob: look", lambda one: one.outcome == "completed")
            assert (await again.details(bob.agent_id)).agent.worktree == ""
            ann = await again.agent("@ann")
            assert (Path(ann.worktree) / "b.txt").read_text() == "B"
            assert len(left(project)) == 4


# --- permissions

SECRET = "TOPSECRET"
DENY = {"decision": "deny", "path": "secrets/**"}
VIEW = {"decision": "allow", "tool": "view"}
DENIED = "Not allowed: a rule denies it: deny path secrets/**."


def views(path: Path) -> Reply:
    return calls("view", file_path=str(path))


def make_secret(folder: Path) -> tuple[Path, Path]:
    """A repository with a file that is also in every worktree."""
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
async def test_workspace_deny_rules_apply_in_a_worktree(
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
    ) as harness:
        if skips:
            skip = {"skip": True, "session_id": harness.session_id}
            assert (await harness.request("POST", "/permissions/skip", skip)).status == 200
        await harness.received.complete(await harness.prompt("@lead: go", **more))
        for who, refused in (("", 2), ("@ann", 3), ("@bob", 3)):
            contents = [result.content for result in await harness.results(who)]
            assert contents[:refused] == [DENIED] * refused, who


async def test_deny_rules_of_the_caller_apply_in_a_worktree(
    tmp_path: Path,
) -> None:
    _, secret = make_secret(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", views(secret)),
    ) as harness:
        await harness.received.complete(await harness.prompt("@lead: go", approve=[DENY, VIEW]))
        (result,) = await harness.results("@ann")
        expected = "Not allowed: the caller of this run denies it: deny path secrets/**."
        assert result.content == expected


async def test_deny_rules_apply_in_nested_worktrees(
    tmp_path: Path,
) -> None:
    """Three levels deep: denied in the workspace and in the worktrees of all parents."""
    project, _ = make_secret(tmp_path)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", worktree=True), then="Over."),
        talk("@ann", start("@bob: go", worktree=True)),
        talk("@bob", held("", calls=start("@cat: go", worktree=True).calls)),
        config={"permission_rules": [DENY], "permissions": {"allowed_tools": ["view"]}},
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        asked = await harness.until_asked_by("@bob")
        above = [Path((await harness.agent(who)).worktree) for who in ("@ann", "@bob")]
        secrets = [folder / "secrets" / "key" for folder in (project, *above)]
        assert [secret.read_text() for secret in secrets] == [SECRET] * 3
        inside = calls("view", file_path="secrets/key")
        harness.play(
            *map(talk, ("@lead", "@ann", "@bob")), talk("@cat", *map(views, secrets), inside)
        )
        harness.release(asked)
        await harness.received.complete(run_id)
        assert [one.content for one in await harness.results("@cat")] == [DENIED] * 4
