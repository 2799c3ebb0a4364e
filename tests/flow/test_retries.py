"""Model retries are published to connected clients."""

from pathlib import Path

from culm.testing.script import Reply
from culm.wire.runs import RunRetry
from tests.flow.probes import script
from tests.flow.runs import open_received, open_runs

PAUSE_S = 5.0  # Before the first retry.


async def test_retry_is_published_with_its_reason_and_pause(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(Reply(status=503))) as harness:
        run_id = await harness.prompt("Hi.")
        retry = (await harness.received.event_with("run_retry")).read(RunRetry)
        title, details = "The provider has a problem", retry.details
        assert retry == RunRetry(run_id, harness.session_id, PAUSE_S, title, details)
        assert "503" in details
        await harness.clock.pass_retry(PAUSE_S)
        assert (await harness.received.complete(run_id)).text == "Fine."
        assert harness.received.all("run_retry", RunRetry) == [retry]


async def test_retry_is_not_in_the_crush_view_and_not_replayed(
    tmp_path: Path,
) -> None:
    async with (
        open_runs(tmp_path, play=script(Reply(status=503))) as harness,
        open_received(harness.remote, view="crush") as crush,
    ):
        cursor = (await harness.remote.snapshot()).cursor
        run_id = await harness.prompt("Hi.")
        await harness.received.event_with("run_retry")
        await harness.clock.pass_retry(PAUSE_S)
        await crush.complete(run_id)
        async with open_received(harness.remote, cursor=cursor) as back:
            await back.complete(run_id)
            for received in (crush, back):
                assert "run_retry" not in [event.type for event in received.events]
