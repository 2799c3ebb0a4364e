"""A workspace with its tools, and something outside that nobody may see."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest

from culm.clock import LoopClock
from culm.tools.base import Call, Result, Tool
from culm.tools.registry import read_only_tools
from culm.tools.work import open_file_work
from culm.wire.codec import Json, encode

SECRET = "nobody may see this"


@dataclass(frozen=True, slots=True)
class Desk:
    path: Path
    tools: dict[str, Tool]

    def write(self, name: str, content: str | bytes = "") -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    async def call(self, tool: str, **arguments: Json) -> Result:
        return await self.tools[tool].run(
            Call("call-1", tool, encode(arguments).decode(), arguments)
        )


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.txt").write_text(SECRET)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
async def desk(folder: Path) -> AsyncGenerator[Desk]:
    async with open_file_work(LoopClock()) as work:
        yield Desk(folder, read_only_tools(folder, work))
