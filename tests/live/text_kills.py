"""Kills a server in the middle of its answers and compares the stored text with the text shown.

`make torture` runs `main`: hundreds of kills at random moments. The suite has a few of them.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from culm.client.stream import SseParser
from culm.client.workspace import RemoteWorkspace
from culm.ids import MessageId
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from culm.wire.events import MessageDelta
from culm.wire.messages import Message, growing_of, text_of
from tests.live.harness import make_directory
from tests.live.run_harness import open_agent, script
from tests.support import WAIT_S

VIEWS = ("delta", "crush")


class ShownText:
    """One stream of a client: the text of every message, as far as it was received."""

    def __init__(self) -> None:
        # The rev of each message, and the text of its parts.
        self.messages: dict[MessageId, tuple[int, dict[int, str]]] = {}
        self.started = asyncio.Event()

    async def read(self, socket: Path, remote: RemoteWorkspace, view: str) -> None:
        """Read the stream until the server is gone."""
        reader, writer = await asyncio.open_unix_connection(str(socket))
        path = f"/v1/workspaces/{remote.id}/events?client_id={remote.client.id}&view={view}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: culm\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        self.started.set()
        parser = SseParser()
        try:
            while data := await reader.read(1 << 20):
                for event in parser.feed(data):
                    if event.type == "message_delta":
                        self._grow(event.read(MessageDelta))
                    elif event.type in ("message", "message_snapshot") and event.op != "deleted":
                        message = event.read(Message)
                        self.messages[message.id] = message.rev, texts_of(message)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _grow(self, delta: MessageDelta) -> None:
        rev, texts = self.messages[delta.message_id]
        known = texts.get(delta.part, "")
        assert (rev, len(known)) == (delta.rev, delta.offset), f"a gap before {delta}"
        texts[delta.part] = known + delta.text

    def size(self) -> int:
        return sum(len(text) for _, texts in self.messages.values() for text in texts.values())


def texts_of(message: Message) -> dict[int, str]:
    return {
        n: text_of(part, kind) or ""
        for n, part in enumerate(message.parts)
        if (kind := growing_of(part)) is not None
    }


async def kill_once(folder: Path, seed: int, *, runs: int, rate: float) -> int:
    """Kill a server while it answers, and check its text; return how much was shown."""
    dice = random.Random(seed)
    reply = Reply(reasoning="Let me see. " * 5, tokens=100_000, rate=rate)
    async with open_model_server(script(otherwise=reply)) as model:
        shown = {view: ShownText() for view in VIEWS}
        async with open_agent(folder, model) as (server, client), asyncio.TaskGroup() as reading:
            remote = await client.open_workspace(make_directory(folder))
            for view, stream in shown.items():
                reading.create_task(stream.read(folder / "s", remote, view))
                await stream.started.wait()
            for _ in range(runs):
                session = await remote.create_session("s")
                await remote.prompt(session.id, "go")
            async with asyncio.timeout(WAIT_S):
                while not shown["delta"].size():
                    await asyncio.sleep(0.001)
            await asyncio.sleep(dice.random() * dice.choice((0.02, 0.3, 4.0)))
            await server.kill()
        async with open_agent(folder, model) as (_, client):
            remote = await client.open_workspace(make_directory(folder))
            stored = {m.id: m for m in (await remote.snapshot("*")).messages}
    for view, stream in shown.items():
        for message_id, (_, texts) in stream.messages.items():
            found = texts_of(stored[message_id])
            for n, text in texts.items():
                kept = found.get(n, "")
                lost = len(text) - len(kept)
                assert kept.startswith(text), f"seed {seed}, {view} view: {lost} characters lost"
    return shown["delta"].size()


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.live.text_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    args = parser.parse_args()
    _print(f"{args.kills} kills, from seed {args.seed}")
    sizes: Counter[tuple[int, float]] = Counter()
    for number in range(args.kills):
        runs, rate = (1, 20)[number % 2], (0.0, 100.0)[number // 2 % 2]
        with tempfile.TemporaryDirectory(prefix="culm-") as name:
            seed = args.seed + number
            sizes[runs, rate] += await kill_once(Path(name), seed, runs=runs, rate=rate)
        if (number + 1) % 50 == 0:
            _print(f"{number + 1} kills, nothing lost")
    for (runs, rate), size in sorted(sizes.items()):
        pace = f"{rate:g} tokens/s" if rate else "flat out"
        _print(f"{runs} run(s), {pace}: {size} characters shown and kept")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main())
