"""Agents with a git worktree of their own: what they change is on their branch and nowhere else."""

import subprocess
from pathlib import Path

from tests.flow.agents_stage import calls, open_agents, start, talk
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
