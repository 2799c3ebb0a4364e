"""Complete editing tasks: search, read, change and test files, compared byte for byte."""

import re
from functools import partial
from pathlib import Path

from culm.wire.messages import Session, Todo
from culm.wire.runs import ShellOutput, ShellRequest
from tests.quality.task import bash, open_task, use
from tests.support import contract

GEOMETRY = b"def area(w, h):\n    return w * h\n"
MAIN = b"from shop.geometry import area\n\nprint(area(2, 3), area(4, 5))\n"
README = b"# Shop\n\nCall `area(w, h)`; the area of nothing is 0.\n"
TEST = b"""\
import unittest

from shop.geometry import area


class AreaTest(unittest.TestCase):
    def test_area(self):
        self.assertEqual(area(2, 3), 6)
"""
SHOP = {
    "README.md": README,
    "shop/__init__.py": b"",
    "shop/geometry.py": GEOMETRY,
    "shop/main.py": MAIN,
    "test_shop.py": TEST,
}


async def test_a_function_is_renamed_in_every_file_and_its_tests_pass(tmp_path: Path) -> None:
    async with open_task(tmp_path, SHOP) as task:
        edit_test = partial(use, "edit", file_path="test_shop.py")
        named = [name for name in SHOP if name != "shop/__init__.py"]
        found, *_ = await task.run_calls(
            use("grep", pattern=r"\barea\("),
            [use("view", file_path=name) for name in named],
            approve="deny",  # Reading needs no approval.
        )
        assert sorted(re.findall(r"^(\S+):$", found, re.MULTILINE)) == named
        await task.run_calls(
            use("edit", file_path="shop/geometry.py", old_string="area", new_string="surface"),
            use("multiedit", file_path="shop/main.py", edits=[
                {"old_string": "import area", "new_string": "import surface"},
                {"old_string": "area(", "new_string": "surface(", "replace_all": True},
            ]),
            [
                use("edit", file_path="README.md", old_string="area(", new_string="surface("),
                edit_test(old_string=" area\n", new_string=" surface\n"),
                edit_test(old_string="(area(2", new_string="(surface(2"),
            ],
        )  # fmt: skip
        (ran,) = await task.run_calls(
            bash("python3 -B -m unittest 2>&1 | tail -1; python3 -B -m shop.main")
        )
        assert ran == "OK\n6 20"
        status, left = await task.run_calls(
            bash("git status --short"), bash(r"grep -rn '\barea(' ."), approve="deny"
        )
        assert status == " M README.md\n M shop/geometry.py\n M shop/main.py\n M test_shop.py"
        assert left == "(no output)\nExit code 1"

        after = {
            **SHOP,
            "README.md": README.replace(b"area(w", b"surface(w"),
            "shop/geometry.py": GEOMETRY.replace(b"area", b"surface"),
            "shop/main.py": MAIN.replace(b"area", b"surface"),
            "test_shop.py": TEST.replace(b"area\n", b"surface\n").replace(b"area(2", b"surface(2"),
        }
        assert task.tree() == after
        versions = await task.versions()
        assert sorted(versions) == await task.known() == named
        assert {name: recorded[0].encode() for name, recorded in versions.items()} == {
            name: SHOP[name] for name in named
        }
        assert {name: recorded[-1].encode() for name, recorded in versions.items()} == {
            name: after[name] for name in named
        }
        assert {name: len(recorded) for name, recorded in versions.items()} == {
            name: 3 if name == "test_shop.py" else 2 for name in named
        }


async def test_a_failing_test_is_diagnosed_and_fixed(tmp_path: Path) -> None:
    broken = {**SHOP, "shop/geometry.py": GEOMETRY.replace(b"*", b"+")}
    async with open_task(tmp_path, broken) as task:
        run = bash("python3 -B -m unittest 2>&1", description="Run the tests")
        failed, seen = await task.run_calls(run, use("view", file_path="shop/geometry.py"))
        assert "AssertionError: 5 != 6" in failed
        assert failed.endswith("FAILED (failures=1)\nExit code 1")
        assert seen == "     1|def area(w, h):\n     2|    return w + h\n(end of file, line 2)"
        edit = {"old_string": "    return w + h", "new_string": "    return w * h"}
        changed, passed, shown = await task.run_calls(
            use("edit", file_path="shop/geometry.py", **edit), run, bash("git diff -U0 | tail -2")
        )
        assert changed == (
            "Changed shop/geometry.py (+1 -1 lines).\n"
            "     1|def area(w, h):\n     2|    return w * h"
        )
        assert passed.endswith("\n\nOK")
        assert shown == "-    return w + h\n+    return w * h"
        assert task.tree() == SHOP
        assert await task.versions() == {
            "shop/geometry.py": [broken["shop/geometry.py"].decode(), GEOMETRY.decode()]
        }
        assert await task.known() == ["shop/geometry.py"]


def shown_lines(miss: str) -> str:
    """Return the file's text that the error of a failed edit shows."""
    return "\n".join(re.findall(r"^ *\d+\|(.*)$", miss, re.MULTILINE))


async def test_a_mismatch_in_blanks_is_fixed_with_the_text_of_the_error(
    tmp_path: Path,
) -> None:
    make = b"all:\n\tcc -o app app.c\n\t./app\n\nclean:\n\trm app\n"
    legacy = b"[paths]\r\nroot = /srv\r\nlog = /var/log  \r\n\r\n[net]\r\nport=80\r\n"
    prose = "Eins\u00a0zwei drei.  \nVier.\n".encode()
    before = {"Makefile": make, "legacy.ini": legacy, "prose.txt": prose}
    async with open_task(tmp_path, before) as task:
        await task.run_calls([use("view", file_path=name) for name in before])

        wanted = "all:\n    cc -o app app.c\n    ./app"
        miss = await task.run_failing_call(
            use("edit", file_path="Makefile", old_string=wanted, new_string="all:")
        )
        assert "lines 1 to 3" in miss
        assert "the file is indented with tabs, old_string is not" in miss
        there = shown_lines(miss)
        put = there.replace("./app", "./app --quiet")
        await task.run_calls(use("edit", file_path="Makefile", old_string=there, new_string=put))

        # Line endings need no second try, whichever kind the model writes.
        await task.run_calls(
            use("edit", file_path="legacy.ini", old_string="[paths]\nroot = /srv\n",
                new_string="[paths]\nroot = /opt\nuser = me\n"),
        )  # fmt: skip
        miss = await task.run_failing_call(
            use("edit", file_path="legacy.ini", old_string="log = /var/log\n\n[net]",
                new_string="[net]"),
        )  # fmt: skip
        assert "blanks at the end of a line" in miss
        await task.run_calls(
            use("edit", file_path="legacy.ini", old_string=shown_lines(miss) + "\n",
                new_string="[net]\n"),
        )  # fmt: skip

        edits = [
            {"old_string": "Vier.", "new_string": "Vier und fünf."},
            {"old_string": "Eins zwei", "new_string": "1 2"},
        ]
        (partly,) = await task.run_calls(use("multiedit", file_path="prose.txt", edits=edits))
        assert "1 of 2 edits were made; these were not:" in partly
        assert "U+00A0" in partly
        await task.run_calls(
            use("edit", file_path="prose.txt", old_string="Eins\u00a0zwei", new_string="1 2")
        )

        assert task.tree() == {
            "Makefile": make.replace(b"./app\n", b"./app --quiet\n"),
            "legacy.ini": b"[paths]\r\nroot = /opt\r\nuser = me\r\n[net]\r\nport=80\r\n",
            "prose.txt": "1 2 drei.  \nVier und fünf.\n".encode(),
        }
        versions = await task.versions()
        assert {name: len(recorded) for name, recorded in versions.items()} == {
            "Makefile": 2, "legacy.ini": 3, "prose.txt": 3,
        }  # fmt: skip
        assert {name: recorded[0].encode() for name, recorded in versions.items()} == before
        assert {name: recorded[-1].encode() for name, recorded in versions.items()} == task.tree()
        assert await task.known() == sorted(before)


async def test_fifty_edits_of_one_file_are_all_made_and_all_reverted_at_once(
    tmp_path: Path,
) -> None:
    count = 50
    lines = [f"value_{n:02} = {n}\n" for n in range(count)]
    before = "".join(lines).encode()
    async with open_task(tmp_path, {"values.py": before}) as task:
        edits = [
            {"old_string": f"value_{n:02} = {n}\n", "new_string": f"value_{n:02} = {n * n}  # ²\n"}
            for n in range(count)
        ]
        calls = [use("edit", file_path="values.py", **edit) for edit in edits]
        await task.run_calls(use("view", file_path="values.py"))
        for n in range(0, count, 10):  # Five in sequence and five in parallel.
            await task.run_calls(*calls[n : n + 5], calls[n + 5 : n + 10])
        after = "".join(edit["new_string"] for edit in edits).encode()
        assert task.tree() == {"values.py": after}
        back = [
            {"old_string": edit["new_string"], "new_string": edit["old_string"]} for edit in edits
        ]
        (undone,) = await task.run_calls(use("multiedit", file_path="values.py", edits=back))
        assert undone.endswith(f"All {count} edits were made.")
        assert task.tree() == {"values.py": before}
        recorded = [
            "".join([edit["new_string"] for edit in edits[:n]] + lines[n:])
            for n in range(count + 1)
        ]
        assert await task.versions() == {"values.py": [*recorded, recorded[0]]}
        assert await task.known() == ["values.py"]


LISTED = """\
  .git/
  README.md
  hello/
    __init__.py
    __main__.py
    words.py"""


@contract("INV-73")
async def test_a_new_package_is_written_listed_and_run_after_one_approval(tmp_path: Path) -> None:
    package = {
        "hello/__init__.py": b"",
        "hello/__main__.py": b"from hello.words import greet\n\nprint(greet('World'))\n",
        "hello/words.py": "def greet(name):\n    return f'Grüß Gott, {name}'\n".encode(),
        "README.md": b"# Hello\n",
    }
    steps = ["Write the package", "Run it"]

    def list_with(*statuses: str) -> list[dict[str, str]]:
        pairs = zip(steps, statuses, strict=True)
        return [{"content": step, "status": status, "active_form": ""} for step, status in pairs]

    async with open_task(tmp_path, {}) as task:
        run_id = await task.start(
            use("todos", todos=list_with("in_progress", "pending")),
            [use("write", file_path=name, content=data.decode()) for name, data in package.items()],
            [use("ls", depth=3), use("glob", pattern="**/*.py")],
            use("todos", todos=list_with("completed", "in_progress")),
            approve="ask",
        )
        asked = await task.wait_for_request()
        assert (asked.tool_name, asked.action) == ("write", "write")
        await task.answer(asked.id, "allow_session")
        results = await task.finish(run_id)
        assert [result.is_error for result in results] == [False] * 8
        assert len(task.requests()) == 1  # The answer covers the other three.
        *_, listed, found, _ = (result.content for result in results)
        assert listed == f"{task.folder}/\n{LISTED}"
        assert sorted(found.splitlines()) == sorted(n for n in package if n.endswith(".py"))
        ran, _ = await task.run_calls(
            bash("python3 -B -m hello"), use("todos", todos=list_with("completed", "completed"))
        )
        assert ran == "Grüß Gott, World"

        assert task.tree() == package
        assert await task.versions() == {
            name: ["", data.decode()] for name, data in package.items()
        }
        assert await task.known() == sorted(package)
        session = await task.ask(f"/sessions/{task.session_id}", Session)
        assert session.todos == [Todo(step, "completed", "") for step in steps]


async def test_a_change_by_the_user_in_between_is_not_lost(tmp_path: Path) -> None:
    before = b"host = a\nport = 1\n"
    async with open_task(tmp_path, {"app.cfg": before}) as task:
        await task.run_calls(use("view", file_path="app.cfg"))
        typed = ShellRequest("sed -i s/a$/b/ app.cfg && cat app.cfg; exit 3", term_width=80)
        path = task.remote.path(f"/agent/sessions/{task.session_id}/shell")
        output = await task.remote.client.ask("POST", path, ShellOutput, typed)
        assert output == ShellOutput("host = b\nport = 1\n", 3)

        edit = use("edit", file_path="app.cfg", old_string="port = 1", new_string="port = 2")
        refused = await task.run_failing_call(edit)
        assert refused == (
            "app.cfg has changed since it was last read; view it again first. Nothing was written."
        )
        asked = task.model.requests[-1].raw.decode()
        assert "sed -i s/a$/b/ app.cfg" in asked  # The model reads the user's command.
        await task.run_calls(use("view", file_path="app.cfg"), edit)
        assert task.tree() == {"app.cfg": b"host = b\nport = 2\n"}
        assert await task.versions() == {
            "app.cfg": ["host = b\nport = 1\n", "host = b\nport = 2\n"]
        }
