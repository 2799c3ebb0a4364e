"""Configuration files beside a running server, and a clock that controls when they are read."""

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
from tests.flow.probes import Probe, WaitableClock
from tests.flow.runs import Harness, ReceivedEvents, open_received

ConfigDict = Mapping[str, object]


class ConfigClock(WaitableClock):
    """A clock with which a test decides when the server reads the files again."""

    async def check_files(self, workspaces: int = 1) -> None:
        """Let this many workspaces read their files, and wait until each of them has."""
        await self._watching(workspaces)
        self.advance(WATCH_EVERY_S)
        await self._watching(workspaces)

    async def _watching(self, count: int) -> None:
        await until(lambda: list(self._waiting()).count(WATCH_EVERY_S) == count)


def write(file: Path, content: ConfigDict | str) -> bytes:
    """Write a file atomically, as editors do; returns its content."""
    data = (content if isinstance(content, str) else json.dumps(content)).encode()
    draft = file.with_name(f"{file.name}.draft")
    draft.write_bytes(data)
    draft.rename(file)
    return data


# --- parts of a configuration


def chosen(provider_id: str = "demo", model_id: str = "demo-1", **more: object) -> ConfigDict:
    return {"model": model_id, "provider": provider_id, **more}


def provider(url: str, key: str = "k", **more: object) -> ConfigDict:
    about = {"id": "demo-1", "name": "Demo One", "context_window": 200_000}
    return {"type": "openai-compat", "base_url": url, "api_key": key, "models": [about], **more}


def config_of(providers: Mapping[str, ConfigDict], **more: object) -> ConfigDict:
    """A configuration that selects the first of these providers for all models."""
    first = chosen(next(iter(providers)))
    return {"models": {"large": first, "small": first}, "providers": providers, **more}


# --- a server with configuration files


@asynccontextmanager
async def open_configured(
    folder: Path,
    model: ModelServer,
    config: ConfigDict | None,
    *,
    clock: WaitableClock | None = None,
    tools: Iterable[Probe] | None = (),
    env: Mapping[str, str] | None = None,
    data_dir: str = "",
) -> AsyncGenerator[Harness]:
    """A server whose user file is `config`; `env` and `data_dir` are sent with the create.

    With `tools` None it has the real tools.
    """
    clock = clock or ConfigClock()
    given = None if tools is None else {tool.name: tool for tool in tools}
    async with open_flow(folder, "unix", clock=clock, config=config, tools=given) as flow:
        client = await flow.client()
        remote = await client.open_workspace(flow.directory(), env=env, data_dir=data_dir)
        session_id = (await remote.create_session("unnamed")).id
        async with open_received(remote) as received:
            yield Harness(flow, clock, model, remote, session_id, received)


async def shown(harness: Harness) -> Config:
    return await harness.ask("/config", Config)


async def notices(harness: Harness) -> list[str]:
    return (await harness.ask("", Workspace)).notices


def changes(received: ReceivedEvents) -> int:
    """The number of `config_changed` events that a client received."""
    return [event.type for event in received.events].count("config_changed")
