"""Static judgement of shell commands: what they run, and whether they only read."""

from pathlib import Path

import pytest

from culm.shell.judge import Judgement, judge
from culm.shell.table import TABLE, table_markdown
from tests.shell.cases import ASKED, FREE
from tests.shell.conftest import Judge


@pytest.mark.parametrize("command", FREE)
def test_command_that_only_reads_inside_is_free(judge_command: Judge, command: str) -> None:
    judgement = judge_command(command)
    assert judgement.why == ""
    assert judgement.is_free
    assert judgement.commands == judgement.seen
    assert judgement.coverage == ()


@pytest.mark.parametrize("command", ASKED)
def test_command_that_may_do_more_is_never_free(judge_command: Judge, command: str) -> None:
    judgement = judge_command(command)
    assert not judgement.is_free
    assert judgement.why.endswith(".")
    # Without coverage, every grant would cover it.
    assert bool(judgement.coverage) == (judgement.commands is not None)


# The command; every simple command in it; what a grant for it covers. `@` stands for the workspace.
RESOLVED: list[tuple[str, list[str], list[str]]] = [
    ("rm -rf x", ["rm -rf x"], ["rm"]),
    ("ls; rm x", ["ls", "rm x"], ["rm"]),
    ('rm "a b"  c', ["rm a b c"], ["rm"]),
    ("git commit -m 'a b'", ["git commit -m a b"], ["git commit"]),
    ("git push origin main && npm test", ["git push origin main", "npm test"],
     ["git push", "npm test"]),
    ("npm run build", ["npm run build"], ["npm run build"]),
    ("git -c a=b log", ["git -c a=b log"], ["git -c a=b log"]),
    ("docker run -it x sh", ["docker run -it x sh"], ["docker run -it x sh"]),
    ("docker ps", ["docker ps"], ["docker ps"]),
    ("kubectl -n a delete pod b", ["kubectl -n a delete pod b"], ["kubectl -n a delete pod"]),
    ("make -j4 all", ["make -j4 all"], ["make -j4 all"]),
    ("./sub/b.py x", ["./sub/b.py x"], ["@/sub/b.py"]),
    ("cd sub && ./b.py", ["cd sub", "./b.py"], ["@/sub/b.py in @/sub"]),
    ("cd sub && npm test", ["cd sub", "npm test"], ["npm test in @/sub"]),
    ("(cd sub; npm test); npm test", ["cd sub", "npm test"],
     ["npm test", "npm test in @/sub or @"]),
    ("cd $x; npm test", ["cd $x", "npm test"],
     ["cd $x", "npm test in a directory that cannot be told"]),
    ("git fetch --upload=x y", ["git fetch --upload=x y"], ["git fetch --upload=x y"]),
    ("git clone -c a=b y", ["git clone -c a=b y"], ["git clone -c a=b y"]),
    ("go test -exec x ./...", ["go test -exec x ./..."], ["go test -exec x ./..."]),
    ("uv run --frozen pytest", ["uv run --frozen pytest"], ["uv run --frozen pytest"]),
    ("npx --yes eslint", ["npx --yes eslint"], ["npx --yes eslint"]),
    ("npm exec -- eslint", ["npm exec -- eslint"], ["npm exec -- eslint"]),
    ("npm run -s build", ["npm run -s build"], ["npm run -s build"]),
    ("deno run -A x.ts", ["deno run -A x.ts"], ["deno run -A x.ts"]),
    ("uv tool run ruff", ["uv tool run ruff"], ["uv tool run ruff"]),
    ("conda run -n a x", ["conda run -n a x"], ["conda run -n a x"]),
    ("ip netns exec a x", ["ip netns exec a x"], ["ip netns exec a x"]),
    ("cargo run x", ["cargo run x"], ["cargo run x"]),
    ("git push -u origin x", ["git push -u origin x"], ["git push"]),
    ("python sub/b.py -v", ["python sub/b.py -v"], ["python @/sub/b.py"]),
    ("bash +x sub/b.py", ["bash +x sub/b.py"], ["bash +x sub/b.py"]),
    ("python -m pytest -q", ["python -m pytest -q"], ["python -m pytest"]),
    ("python -c 'print(1)'", ["python -c print(1)"], ["python -c 'print(1)'"]),
    ("curl 'a -o b'", ["curl a -o b"], ["curl 'a -o b'"]),
    ("uv run pytest -q", ["uv run pytest -q", "pytest -q"], ["uv run pytest"]),
    ("npx eslint .", ["npx eslint .", "eslint ."], ["npx eslint"]),
    ("sudo -u x apt install y", ["sudo -u x apt install y", "apt install y"],
     ["sudo apt install"]),
    ("ls | xargs rm -f", ["ls", "xargs rm -f", "rm -f"], ["xargs rm"]),
    ("find . -name x -exec rm {} +", ["rm {}", "find . -name x -exec rm {} +"],
     ["find . -name x -exec rm {} +", "rm"]),
    ("timeout -k 1 5 nice -n 3 env X=1 rm x", ["X=1", "rm x"], ["X=1", "rm"]),
    ("env -u X rm x", ["env -u X rm x", "rm x"], ["env rm"]),
    ("env -i git log", ["env -i git log", "git log"], ["env git log"]),
    ("for PATH in bin sub; do ls; done", ["for PATH in bin sub", "ls"], ["for PATH in bin sub"]),
    # A command with an option that is not in the table is granted literally.
    ("git log --output='a b'", ["git log --output=a b"], ["git log --output='a b'"]),
    ("cat $x", ["cat $x"], ["cat $x"]),
    ("nohup stdbuf -oL npm start", ["npm start"], ["npm start"]),
    ("bash -c 'ls; bash -c \"rm x\"'", ["ls", "rm x"], ["rm"]),
    ("LC_ALL=C rm x", ["rm x"], ["rm"]),
    ("PATH=. ls", ["PATH=.", "ls"], ["PATH=."]),
    ("env LD_PRELOAD=x ls", ["LD_PRELOAD=x", "ls"], ["LD_PRELOAD=x"]),
    ("echo hi > new", ["echo hi", "> @/new"], ["> @/new"]),
    ("cd sub && echo hi >> new", ["cd sub", "echo hi", "> @/sub/new"], ["> @/sub/new"]),
    ("cat < /etc/hostname", ["cat", "< /etc/hostname"], ["< /etc/hostname"]),
    ("cat /etc/hostname", ["cat /etc/hostname"], ["cat /etc/hostname"]),
    ("cat out/hostname", ["cat out/hostname"], ["cat /etc/hostname"]),
    ("cd /etc && ls", ["cd /etc", "ls"], ["cd /etc", "ls /etc"]),
    ("echo $(rm x) `rm y` <(rm z)",
     ["rm x", "rm y", "rm z", "echo $(rm x) `rm y` <(rm z)"], ["echo", "rm"]),
    ("echo ${x:-$(rm x)}", ["rm x", "echo ${x:-$(rm x)}"], ["echo", "rm"]),
    ("cat <<EOF\n$(rm x)\nEOF", ["cat", "rm x"], ["rm"]),
    ("cat <<EOF | sort -o new && rm x\nhi\nEOF", ["cat", "sort -o new", "rm x"],
     ["rm", "sort -o new"]),
    ("cat <<'EOF' > new\n$(rm x)\nEOF", ["cat", "> @/new"], ["> @/new"]),
    ("if a; then b; elif c; then d; else e; fi", ["a", "b", "c", "d", "e"],
     ["a", "b", "c", "d", "e"]),
    ("while a; do b; done; until c; do d; done", ["a", "b", "c", "d"], ["a", "b", "c", "d"]),
    ("for f in $(a); do b $f; done", ["a", "b $f"], ["b", "a"]),
    ("case $(a) in b) c;; *) d;; esac", ["a", "c", "d"], ["a", "c", "d"]),
    ("(a; b) & { c; } | d |& e || ! f", ["a", "b", "c", "d", "e", "f"],
     ["a", "b", "c", "d", "e", "f"]),
    ("[[ -f $(a) ]] && b", ["a", "[[ -f $(a) ]]", "b"], ["[", "a", "b"]),
    ("f() { rm x; }; f y", ["rm x", "f y"], ["f", "function f", "rm"]),
    ("x=$(a) b", ["a", "x=$(a)", "b"], ["a", "b", "x=$(a)"]),
    ("x=(a $(b))", ["b", "x=(a $(b))"], ["b", "x=(a $(b))"]),
    ("export X=1", ["export X=1"], ["export"]),
    ("rm $x", ["rm $x"], ["rm"]),
    ("wc -l *.nosuch /etc/hostname", ["wc -l *.nosuch /etc/hostname"], ["wc /etc/hostname"]),
    ("env", ["env"], ["env"]),
    ("printenv HOME", ["printenv HOME"], ["printenv"]),
    ("curl -s x", ["curl -s x"], ["curl -s x"]),
    ("cat <<EOF\n$HOME\nEOF", ["cat"], ["cat <<EOF\n$HOME\nEOF"]),
]  # fmt: skip


@pytest.mark.parametrize(("command", "commands", "coverage"), RESOLVED)
def test_every_simple_command_is_listed_with_its_coverage(
    judge_command: Judge,
    workspace_root: Path,
    command: str,
    commands: list[str],
    coverage: list[str],
) -> None:
    judgement = judge_command(command)
    assert not judgement.is_free
    assert judgement.commands == tuple(one.replace("@", str(workspace_root)) for one in commands)
    assert judgement.coverage == tuple(
        sorted(one.replace("@", str(workspace_root)) for one in coverage)
    )


# Unresolvable commands, and what deny rules still see in them.
UNRESOLVED: list[tuple[str, list[str]]] = [
    ("eval rm x", ["eval rm x"]),
    (". ./a.txt", [". ./a.txt"]),
    ("$x y", ["$x y"]),
    ('bash -c "$x"', ['bash -c "$x"']),
    ("cat a.txt | sh", ["cat a.txt", "sh"]),
    ("python3 - < a.txt", ["python3 -"]),
    ("git $x", ["git $x"]),
    ("ls() { rm x; }; ls", ["rm x", "ls"]),
    ("alias ls=rm; ls", ["alias ls=rm", "ls"]),
    ("trap 'rm x' EXIT", ["trap rm x EXIT"]),
    ('echo "${x@P}"', ['echo "${x@P}"']),
    ("echo $((a[$(rm x)]))", ["rm x", "echo $((a[$(rm x)]))"]),
    ("test -v 'a[$(rm x)]'", ["test -v a[$(rm x)]"]),
    ("ls > $x", ["ls", "> $x"]),
    ("rm x; if", ["rm x"]),
    ("timeout --odd 5 rm x", ["timeout --odd 5 rm x", "5 rm x"]),
    ("xargs bash -c", ["xargs bash -c", "bash -c"]),
    ("bash -c -l 'rm x'", ["bash -c -l rm x"]),
    ("bash -c -- 'rm x'", ["bash -c -- rm x"]),
    ("bash -c +x 'rm x'", ["bash -c +x rm x"]),
]


@pytest.mark.parametrize(("command", "seen"), UNRESOLVED)
def test_unresolvable_command_is_reported_with_its_reason(
    judge_command: Judge, command: str, seen: list[str]
) -> None:
    judgement = judge_command(command)
    assert judgement == Judgement(
        is_free=False,
        commands=None,
        coverage=(),
        paths=judgement.paths,
        why=judgement.why,
        seen=tuple(seen),
    )
    assert judgement.why.startswith("Cannot determine what it runs: ")


@pytest.mark.parametrize(
    "command", ["watch -n 1 rm x", "flock f rm x", "strace -f -o log rm x", "zsh -c 'rm x'"]
)
def test_seen_commands_include_arguments_that_may_be_commands(
    judge_command: Judge, command: str
) -> None:
    judgement = judge_command(command)
    assert "rm x" in judgement.seen
    assert judgement.commands is not None
    assert "rm x" not in judgement.commands


def test_paths_are_resolved_to_their_real_location(
    judge_command: Judge, workspace_root: Path
) -> None:
    judgement = judge_command(
        "cp --target=sub out/hostname a.txt && cat sub/../a.txt > sub/new < a.txt"
    )
    names = ("a.txt", "sub", "sub/new")
    paths = ["/etc/hostname", *(f"{workspace_root}/{name}" for name in names)]
    assert judgement.paths == tuple(sorted(paths))


def test_outside_working_directory_makes_readers_not_free(workspace_root: Path) -> None:
    assert not judge("ls", Path("/"), [workspace_root]).is_free
    assert not judge("git log", workspace_root, [workspace_root / "sub"]).is_free
    assert judge("echo hi", workspace_root / "sub", [Path("/nosuch"), workspace_root]).is_free


@pytest.mark.parametrize(
    "command",
    [
        "ls;" * 1_001,
        "ls " + "a " * 40_000,
        "(" * 1_500,
        "$(" * 1_500,
        "ls && " * 5_000 + "ls",
        "x=(" * 1_900,
        "echo " + "$(echo " * 200 + ")" * 200,
        "nice " * 30 + "ls",
        "bash -c 'ls';" * 20,
    ],
    ids=lambda text: text[:12],
)
def test_oversized_command_is_not_judged(judge_command: Judge, command: str) -> None:
    judgement = judge_command(command)
    assert (judgement.is_free, judgement.commands, judgement.coverage) == (False, None, ())


def test_table_lists_every_command_and_option() -> None:
    text = table_markdown()
    for name, entry in TABLE.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for option in entry.flags | entry.values | entry.paths | entry.optional:
            assert f"`{option}" in row
