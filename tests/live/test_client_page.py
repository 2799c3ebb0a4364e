"""The examples of docs/client.md work as written."""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from culm.client.http import Client
from culm.client.workspace import (
    RemoteConfig,
    RemoteLsps,
    RemoteMcp,
    RemoteProject,
    RemoteSkills,
    RemoteWorkspace,
)
from culm.wire.codec import encode
from tests.live.harness import RESUME_S, ROOT, make_directory, open_process, open_process_server
from tests.live.machine import env_of

PAGE = ROOT / "docs" / "client.md"
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
OTHERS = (RemoteConfig, RemoteProject, RemoteSkills, RemoteLsps, RemoteMcp)

# One process runs all examples like a notebook; a complete program gets its own thread.
NOTEBOOK = """
import ast, asyncio, json, sys
from inspect import CO_COROUTINE
from types import FunctionType

from culm.client import connect

from culm.client import open_present

async def main(blocks):
    async with connect() as client:
        workspace = await client.open_workspace(".")
        async with open_present(workspace):
            names = {"client": client, "workspace": workspace, "asyncio": asyncio}
            for number, block in enumerate(blocks):
                print(f"--- {number}", flush=True)
                print(f"--- {number}", file=sys.stderr, flush=True)
                code = compile(block, f"example {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                if "asyncio.run(" in block:
                    await asyncio.to_thread(exec, code, {})
                elif code.co_flags & CO_COROUTINE:
                    await FunctionType(code, names)()
                else:
                    exec(code, names)

asyncio.run(main(json.load(open(sys.argv[1]))))
"""


async def test_client_page_examples_run(folder: Path) -> None:
    project = make_directory(folder)
    (project / "README.md").write_text("# Plums\n\nHow to grow them.\n")
    hosts = ("--host", f"unix://{folder}/s", "--host", "tcp://127.0.0.1:0")
    env = env_of({"CULM_NO_DISCOVERY": "1", "CULM_HOST": f"unix://{folder}/s"})
    async with open_process_server(folder, *hosts, env=env) as server:
        elsewhere = {
            "https://build.example:7777": server.urls[1],
            "build.token": str(folder / "data" / "token"),
            "/srv/project": str(project),
        }
        blocks = EXAMPLE.findall(PAGE.read_text())
        for written, here in elsewhere.items():
            assert sum(written in block for block in blocks) == 1
            blocks = [block.replace(written, here) for block in blocks]
        (folder / "blocks.json").write_bytes(encode(blocks))
        program = f"import os; os.chdir({str(project)!r})\n{NOTEBOOK}"
        argv = ("-W", "error", "-c", program, str(folder / "blocks.json"))
        async with open_process(folder, *argv, env=env) as notebook:
            ended = await notebook.wait(2 * RESUME_S)
    assert ended.status == 0, f"{ended.stdout}\n{ended.stderr}"
    outputs = [part.partition("\n")[2] for part in ended.stdout.split("--- ")[1:]]
    assert len(outputs) == len(blocks)
    for text in (
        "README.md",
        "# Plums",
        "True end_turn",
        "slow-1', 'ended', 'canceled'",
        "reader",
    ):
        assert any(text in one for one in outputs), f"{text}\n{ended.stdout}"
    assert (project / "bed.txt").exists()


def test_client_page_lists_exactly_the_methods_of_the_client() -> None:
    of_client, of_workspace = PAGE.read_text().split("## All methods")[1].split("Of `workspace`")
    listed = {noun: set(names(cells)) for noun, cells in rows(of_workspace)}
    of_parts = {kind.__name__.removeprefix("Remote").lower(): methods(kind) for kind in OTHERS}
    assert {noun.strip("`"): listed.pop(noun) for noun in list(listed) if "`" in noun} == of_parts
    assert {name for of_noun in listed.values() for name in of_noun} == methods(RemoteWorkspace)
    assert {name for noun, _ in rows(of_client) for name in names(noun)} == methods(Client) - {
        "create"  # The half of `open_workspace` that `rejoin` repeats.
    }


def rows(text: str) -> list[tuple[str, str]]:
    """Return the cells of a table without its header."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(cells[0], cells[1]) for cells in lines if len(cells) == 2 and "---" not in cells[0]]


def names(cell: str) -> Iterable[str]:
    return re.findall(r"`(\w+)`", cell)


def methods(kind: type) -> set[str]:
    """Return the public async methods of a class."""
    found = inspect.getmembers(kind, inspect.isfunction)
    waiting = {name for name, one in found if inspect.iscoroutinefunction(inspect.unwrap(one))}
    streams = {name for name, one in found if inspect.isasyncgenfunction(inspect.unwrap(one))}
    return {name for name in waiting | streams if not name.startswith("_")}
