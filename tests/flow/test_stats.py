"""What runs have used, asked of a server."""

from pathlib import Path

import pytest

from culm.testing.script import Reply, ScriptedUsage
from culm.wire.stats import DayUsage, ModelUsage, Usage
from tests.flow.probes import script
from tests.flow.runs import open_runs

PRICED = Reply(text="Fine.", usage=ScriptedUsage(input=100, output=10))


async def test_what_runs_have_used_is_added_up(tmp_path: Path, kind: str) -> None:
    prices = {"cost_per_1m_in": 1.0, "cost_per_1m_out": 10.0}
    async with open_runs(tmp_path, kind, script(PRICED, PRICED), info=prices) as stage:
        await stage.talk("Hi.", "And?")
        used = (2, 200, 20, 0.0004, 0)
        stats = await stage.remote.stats(days=1)
        assert stats.total == Usage(*used)
        assert stats.models == [ModelUsage(*used, provider="demo", model="demo-1")]
        assert stats.days == [DayUsage(*used, day="2027-01-15")]
        assert [one.session_id for one in stats.sessions] == [stage.session_id]
        assert stats.since == 1_800_000_000 // 86_400 * 86_400
        stage.clock.advance(2 * 86_400)
        assert (await stage.remote.stats(days=1)).total == Usage()
        assert (await stage.remote.stats()).total == Usage(*used)


@pytest.mark.parametrize("query", ["days=-1", "days=x", "days=40000", "utc_offset_s=90000"])
async def test_a_span_that_is_none_is_refused(tmp_path: Path, query: str) -> None:
    async with open_runs(tmp_path) as stage:
        assert (await stage.request("GET", f"/stats?{query}")).status == 400
