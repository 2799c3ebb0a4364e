"""A model that is asked again: whoever watches knows why it takes so long, and nobody else."""

from pathlib import Path

from culm.testing.script import Reply
from culm.wire.runs import RunRetry
from tests.flow.probes import script
from tests.flow.runs import open_heard, open_runs

PAUSE_S = 5.0  # Before the first retry.


async def test_a_failure_that_is_tried_again_is_told_with_its_reason_and_its_pause(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(Reply(status=503))) as stage:
        run_id = await stage.prompt("Hi.")
        retry = (await stage.heard.saying("run_retry")).read(RunRetry)
        title, details = "The provider has a problem", retry.details
        assert retry == RunRetry(run_id, stage.session_id, PAUSE_S, title, details)
        assert "503" in details
        await stage.clock.pass_retry(PAUSE_S)
        assert (await stage.heard.complete(run_id)).text == "Fine."
        assert stage.heard.all("run_retry", RunRetry) == [retry]


async def test_a_retry_is_unknown_to_crush_and_not_told_again_to_who_comes_back(
    tmp_path: Path,
) -> None:
    async with (
        open_runs(tmp_path, play=script(Reply(status=503))) as stage,
        open_heard(stage.remote, view="crush") as crush,
    ):
        cursor = (await stage.remote.snapshot()).cursor
        run_id = await stage.prompt("Hi.")
        await stage.heard.saying("run_retry")
        await stage.clock.pass_retry(PAUSE_S)
        await crush.complete(run_id)
        async with open_heard(stage.remote, cursor=cursor) as back:
            await back.complete(run_id)
            for heard in (crush, back):
                assert "run_retry" not in [told.type for told in heard.told]
