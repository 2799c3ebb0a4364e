"""What `make run` shows: a server, a scripted model, and one prompt seen by two clients."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.client.http import RemoteWorkspace, open_client
from culm.client.stream import Stream
from culm.ids import Ids
from culm.testing import Reply, Rule, Script, open_model_server
from culm.wire.agent import RunComplete
from culm.wire.events import MessageDelta
from culm.wire.messages import Message
from culm.wire.runs import RunChanged

READY_S = 20.0
SHOW_S = 20.0

PROMPT = "Say hello to whoever is watching."
ANSWER = "Hello to both of you. This answer is scripted: no key, no cost."
SCRIPT = Script(
    replies=[Reply(text=ANSWER, rate=40)],
    rules=[Rule(when="Write a title", reply=Reply(text="A first hello"))],
)


def config_for(model_url: str) -> dict[str, object]:
    """A culm.json that names one model of one provider."""
    chosen = {"model": "scripted", "provider": "script"}
    provider = {"type": "openai-compat", "base_url": model_url, "models": [{"id": "scripted"}]}
    return {"models": {"large": chosen, "small": chosen}, "providers": {"script": provider}}


@asynccontextmanager
async def open_server(folder: Path, model_url: str) -> AsyncGenerator[str]:
    """Start `culm serve` on a socket of its own; end it when the block ends."""
    config = folder / "culm.json"
    config.write_text(json.dumps(config_for(model_url)))
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "culm", "serve", "--log-level", "warning"),
        *("--host", f"unix://{folder}/culm.sock", "--data-dir", str(folder / "data")),
        *("--config", str(config)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None, "asked for a pipe"
    try:
        async with asyncio.timeout(READY_S):
            line = (await server.stdout.readline()).decode().strip()
        if not line:
            raise SystemExit("the server did not start")
        print(line)
        yield line.removeprefix("listening ")
    finally:
        if server.returncode is None:
            server.terminate()
        status = await server.wait()
        print(f"server ended with status {status}")


async def watch(name: str, workspace: RemoteWorkspace, ready: asyncio.Barrier, run_id: str) -> None:
    """Print what this client sees of the run, until it is complete."""
    is_first = True
    async for told in Stream(workspace).events():
        if is_first:
            is_first = False
            await ready.wait()
        match told.type:
            case "run_changed":
                changed = told.read(RunChanged)
                print(f"{name}: run {changed.state} {changed.outcome or ''}".rstrip())
            case "message" if told.op == "created":
                print(f"{name}: {told.read(Message).role} message begins")
            case "message_delta":
                print(f"{name}: … {told.read(MessageDelta).text!r}")
            case "run_complete" if told.read(RunComplete).run_id == run_id:
                print(f"{name}: complete: {told.read(RunComplete).text!r}")
                return
            case _:
                pass


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        async with (
            open_model_server(SCRIPT) as model,
            open_server(Path(name), model.url) as url,
            open_client(url) as first,
            open_client(url) as second,
            asyncio.timeout(SHOW_S),
        ):
            here, there = await first.open_workspace("."), await second.open_workspace(".")
            session = await here.create_session("New Session")
            run_id = Ids().run()
            ready = asyncio.Barrier(3)
            async with asyncio.TaskGroup() as clients:
                clients.create_task(watch("client 1", here, ready, run_id))
                clients.create_task(watch("client 2", there, ready, run_id))
                await ready.wait()
                print(f"client 1 asks: {PROMPT!r}")
                await here.prompt(session.id, PROMPT, run_id=run_id)


if __name__ == "__main__":
    asyncio.run(main())
