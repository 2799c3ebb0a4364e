"""Write frozen facts again: `python -m tests.frozen.record NAME…`. Read the diff before a commit.

A recorded data directory and a recorded database of an old schema are never written again;
`expected` writes the answers of the server about them again.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.frozen import facts
from tests.frozen.data import recorder
from tests.frozen.schemas import databases
from tests.frozen.wire import record as wire


async def record_data() -> None:
    with tempfile.TemporaryDirectory(prefix="culm-") as folder:
        await recorder.record(Path(folder).resolve())


async def record_schemas() -> None:
    with tempfile.TemporaryDirectory(prefix="culm-") as folder:
        await databases.record(Path(folder).resolve())


async def record_expected() -> None:
    """Record the expected answers for all recorded data; the data itself stays."""
    with tempfile.TemporaryDirectory(prefix="culm-") as folder:
        await recorder.record_expected(Path(folder).resolve())
        await databases.record_expected(Path(folder).resolve())


def main() -> None:
    os.environ["CULM_NO_DISCOVERY"] = "1"  # As in tests: keys of this machine are ignored.
    os.environ["XDG_CONFIG_HOME"] = "/nowhere"
    known = {
        **dict.fromkeys(facts.FACTS),
        "wire": wire.main,
        "data": record_data,
        "schemas": record_schemas,
        "expected": record_expected,
    }
    names = sys.argv[1:]
    if not names or set(names) - set(known):
        sys.exit(f"usage: python -m tests.frozen.record {{{' | '.join(known)}}} …")
    for name in names:
        work = known[name]
        if work is None:
            facts.record([name])
        else:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(work())


if __name__ == "__main__":
    main()
