"""Usage statistics over HTTP."""

from pathlib import Path

import pytest

from culm.testing.script import Reply, ScriptedUsage
from culm.wire.runs import DayUsage, ModelUsage, Usage
from tests.flow.probes import script
from tests.flow.runs import open_runs

PRICED = Reply(text="Fine.", usage=ScriptedUsage(input=100, output=10))


async def test_usage_of_runs_is_added_up(tmp_path: Path, kind: str) -> None:
    prices = {"cost_per_1m_in": 1.0, "cost_per_1m_out": 10.0}
    async with open_runs(tmp_path, kind, script(PRICED, PRICED), info=prices) as harness:
        await harness.talk("Hi.", "And?")
        used = (2, 200, 20, 0.0004, 0)
        stats = await harness.remote.stats(days=1)
        assert stats.total == Usage(*used)
        assert stats.models == [ModelUsage(*used, provider="demo", model="demo-1")]
        assert stats.days == [DayUsage(*used, day="2027-01-15")]
        assert [one.session_id for one in stats.sessions] == [harness.session_id]
        assert stats.since == 1_800_000_000 // 86_400 * 86_400
        harness.clock.advance(2 * 86_400)
        assert (await harness.remote.stats(days=1)).total == Usage()
        assert (await harness.remote.stats()).total == Usage(*used)


@pytest.mark.parametrize("query", ["days=-1", "days=x", "days=40000", "utc_offset_s=90000"])
async def test_invalid_period_is_400(tmp_path: Path, query: str) -> None:
    async with open_runs(tmp_path) as harness:
        assert (await harness.request("GET", f"/stats?{query}")).status == 400
