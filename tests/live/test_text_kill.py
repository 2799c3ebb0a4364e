"""Text that a client received is there after `kill -9`. `make torture` has more kills."""

from pathlib import Path

import pytest

from tests.live.text_kills import kill_once
from tests.support import contract


@contract("EXC-26")
@pytest.mark.parametrize("rate", [100.0, 0.0], ids=["paced", "flat out"])
@pytest.mark.parametrize(("runs", "seed"), [(1, 9), (20, 18)])
async def test_shown_text_survives_a_kill(folder: Path, runs: int, seed: int, rate: float) -> None:
    assert await kill_once(folder, seed, runs=runs, rate=rate) > 0
