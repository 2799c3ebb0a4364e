"""Agents with a git worktree of their own: what they change is on their branch and nowhere else."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from culm.testing.script import Reply
from culm.wire.codec import Json
from tests.flow.agents_stage import calls, held, open_agents, start, talk
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
