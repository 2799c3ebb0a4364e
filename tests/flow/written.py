"""Configuration as people write it beside a running server: files, and when they were looked at."""

import json
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from culm.testing.model_server import ModelServer
from culm.wire.config import Config
from culm.wire.workspaces import Workspace
from culm.workspace.config import WATCH_EVERY_S
from tests.flow.conftest import open_flow
from tests.flow.drive import until
from tests.flow.probes import Probe, Wound
from tests.flow.runs import Heard, Stage, open_heard

Written = Mapping[str, object]


class Watched(Wound):
    """A clock by which a test says when the server looks at the files again."""

    async def look(self, workspaces: int = 1) -> None:
        """Let so many workspaces look, and wait until each of them has."""
        await self._watching(workspaces)
        self.advance(WATCH_EVERY_S)
        await self._watching(workspaces)

    async def _watching(self, count: int) -> None:
        await until(lambda: list(self._waiting()).count(WATCH_EVERY_S) == count)


def write(file: Path, content: Written | str) -> bytes:
    """Put a file there in one step, as editors do; returns what is in it."""
    data = (content if isinstance(content, str) else json.dumps(content)).encode()
    draft = file.with_name(f"{file.name}.draft")
    draft.write_bytes(data)
    draft.rename(file)
    return data


# --- what may stand in one


def chosen(provider_id: str = "demo", model_id: str = "demo-1", **more: object) -> Written:
    return {"model": model_id, "provider": provider_id, **more}


def provider(url: str, key: str = "k", **more: object) -> Written:
    about = {"id": "demo-1", "name": "Demo One", "context_window": 200_000}
    return {"type": "openai-compat", "base_url": url, "api_key": key, "models": [about], **more}


def config_of(providers: Mapping[str, Written], **more: object) -> Written:
    """A configuration that selects the first of these providers for everything."""
    first = chosen(next(iter(providers)))
    return {"models": {"large": first, "small": first}, "providers": providers, **more}


# --- a server beside them


@asynccontextmanager
async def open_written(
    folder: Path,
    model: ModelServer,
    config: Written | None,
    *,
    clock: Wound | None = None,
    tools: Iterable[Probe] | None = (),
    env: Mapping[str, str] | None = None,
    data_dir: str = "",
) -> AsyncGenerator[Stage]:
    """A server whose user wrote `config`; `env` and `data_dir` come with the create.

    With `tools` None it has its own.
    """
    clock = clock or Watched()
    given = None if tools is None else {tool.name: tool for tool in tools}
    async with open_flow(folder, "unix", clock=clock, config=config, tools=given) as flow:
        client = await flow.client()
        remote = await client.open_workspace(flow.directory(), env=env, data_dir=data_dir)
        session_id = (await remote.create_session("unnamed")).id
        async with open_heard(remote) as heard:
            yield Stage(flow, clock, model, remote, session_id, heard)


async def shown(stage: Stage) -> Config:
    return await stage.ask("/config", Config)


async def notices(stage: Stage) -> list[str]:
    return (await stage.ask("", Workspace)).notices


def changes(heard: Heard) -> int:
    """How often a client was told that the configuration has changed."""
    return [told.type for told in heard.told].count("config_changed")
