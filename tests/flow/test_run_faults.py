"""Models that fail in mid-run: asked again, or ended in words; never a hang."""

import base64
import socket
from pathlib import Path

import pytest

from culm.settings import Settings
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Script
from tests.flow.probes import TITLE, script
from tests.flow.reading import finish_of
from tests.flow.runs import Stage, open_runs, open_stage
from tests.support import contract, model_config

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)
PAUSES = (5.0, 10.0, 20.0)


async def assert_failed(stage: Stage, run_id: str, title: str, *words: str) -> None:
    """It ended with a title and details that a person understands, and that is told once."""
    complete = await stage.heard.complete(run_id)
    run = await stage.run(run_id)
    assert (run.outcome, run.title) == ("error", title)
    assert run.details
    assert complete.error == f"{title}: {run.details}"
    for word in words:
        assert word in run.details
    finish = finish_of((await stage.messages())[-1])
    assert (finish.reason, finish.message, finish.details) == ("error", title, run.details)
    await stage.catch_up()
    assert stage.heard.completed().count(run_id) == 1
    assert [error.run_id for error in stage.heard.errors()] == [run_id]
    assert not (await stage.session()).is_busy


async def assert_usable(stage: Stage) -> None:
    stage.model.play(script())
    assert (await stage.heard.complete(await stage.prompt("Again."))).text == "Fine."


# --- models


@contract("INV-39")
@pytest.mark.parametrize(
    ("reply", "title", "word"),
    [
        (Reply(status=401), "Authentication problem", "refused the key"),
        (Reply(status=403), "Authentication problem", "refused the key"),
        (Reply(status=400), "The provider refused", "400"),
        (Reply(status=404), "Model or address not found", "demo-1"),
        (Reply(status=429, headers={"Retry-After": "3600"}), "Too many requests", "429"),
        (Reply(deltas=["a ", "b"], malformed_after=1), "Unreadable answer", "no part"),
        (Reply(long_line_bytes=10 << 20), "Unreadable answer", "demo"),
        (Reply(body="<html>Hello</html>"), "Unreadable answer", "instead of a stream"),
        (Reply(status=302, headers={"Location": "http://a.test"}), "The provider has moved", "302"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_asking_again_would_not_mend_ends_the_run_at_once(
    tmp_path: Path, reply: Reply, title: str, word: str
) -> None:
    async with open_runs(tmp_path, play=script(reply)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.complete(run_id)
        assert len(stage.seen()) == 1
        await assert_failed(stage, run_id, title, word)
        await assert_usable(stage)


@contract("INV-39")
@pytest.mark.parametrize(
    ("reply", "title"),
    [
        (Reply(status=500), "The provider has a problem"),
        (Reply(status=503), "The provider has a problem"),
        (Reply(deltas=["Half ", "way"], cut_after=1), "The stream was cut"),
    ],
    ids=["500", "503", "cut"],
)
async def test_what_may_pass_is_asked_four_times_with_growing_pauses_and_then_ends(
    tmp_path: Path, reply: Reply, title: str
) -> None:
    async with open_runs(tmp_path, play=Script([], [TITLE], reply)) as stage:
        run_id = await stage.prompt("Hi.")
        for n, pause_s in enumerate(PAUSES):
            await stage.clock.pass_retry(pause_s, less_s=0.1)
            await stage.flow.settle()
            assert len(stage.seen()) == n + 1
            stage.clock.advance(0.2)
        await assert_failed(stage, run_id, title)
        assert len(stage.seen()) == 4
        await assert_usable(stage)


@contract("INV-39")
@pytest.mark.parametrize(
    "reply",
    [
        Reply(deltas=["Half ", "way"], stall_after=1),
        Reply(deltas=["Half ", "way"], stall_after=0),
        Reply(delay_s=60.0),
    ],
    ids=["in the middle", "at once", "before its head"],
)
async def test_a_model_that_stops_talking_is_asked_four_times_and_then_ends(
    tmp_path: Path, reply: Reply
) -> None:
    settings = Settings(model_first_byte_s=0.1, model_stall_s=0.1)
    async with open_runs(tmp_path, play=Script([], [TITLE], reply), settings=settings) as stage:
        run_id = await stage.prompt("Hi.")
        for pause_s in PAUSES:
            await stage.clock.pass_retry(pause_s)
        await assert_failed(stage, run_id, "The provider stopped answering")
        assert len(stage.seen()) == 4


@contract("INV-38")
@pytest.mark.parametrize(
    ("reply", "pause_s"),
    [
        (Reply(status=429, headers={"Retry-After": "7"}), 7.0),
        (Reply(status=429, headers={"retry-after-ms": "1500"}), 1.5),
        (Reply(status=429), 5.0),
        (Reply(status=500), 5.0),
        (Reply(deltas=["Half ", "way"], cut_after=1), 5.0),
        (Reply(deltas=["Half ", "way"], stall_after=1), 5.0),
        (Reply(deltas=["Half ", "way"], error_after=1), 5.0),
        (Reply(reasoning="Let me think.", cut_after=2), 5.0),
    ],
)
async def test_what_passes_leaves_only_the_answer_that_came_in_the_end(
    tmp_path: Path, reply: Reply, pause_s: float
) -> None:
    # Long enough for the answer that comes, also on a busy machine.
    settings = Settings(model_stall_s=120.0 if reply.stall_after is None else 1.0)
    async with open_runs(tmp_path, play=script(reply), settings=settings) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.clock.pass_retry(pause_s)
        complete = await stage.heard.complete(run_id)
        assert (complete.text, complete.error) == ("Fine.", "")
        assert await stage.rows() == [("user", "Hi.", "stop"), ("assistant", "Fine.", "end_turn")]
        assert stage.heard.errors() == []
        assert len(stage.seen()) == 2


async def test_an_event_that_nobody_knows_is_passed_over(tmp_path: Path) -> None:
    play = script(Reply(text="All is well.", unknown_event=True))
    async with open_runs(tmp_path, play=play) as stage:
        assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "All is well."


async def test_a_provider_that_is_not_there_is_asked_again_and_then_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound and not listening: nobody answers there.
        config = model_config(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        async with (
            open_model_server() as model,
            open_stage(tmp_path, "unix", model, config=config) as stage,
        ):
            run_id = await stage.prompt("Hi.")
            for pause_s in PAUSES:
                await stage.clock.pass_retry(pause_s)
            complete = await stage.heard.complete(run_id)
            assert complete.error.startswith("No connection: 127.0.0.1:")


@contract("INV-36")
async def test_a_queued_run_whose_provider_was_switched_off_ends_before_it_began_and_says_so(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        await stage.prompt("One.", run_id="one")
        await stage.heard.text("Hello")
        await stage.prompt("Two.", run_id="two")
        change = {"scope": 1, "key": "providers.demo.disable", "value": True}
        assert (await stage.request("POST", "/config/set", change)).status == 200
        stage.model.release()
        await stage.heard.complete("two")
        run = await stage.run("two")
        assert (run.outcome, run.title) == ("error", "Model not available")
        assert "provider 'demo' is disabled\nhint: culm models" in run.details
        assert (await stage.rows())[2:] == [("user", "Two.", "stop"), ("assistant", "", "error")]
        await stage.catch_up()
        assert stage.heard.completed() == ["one", "two"]
        assert [error.run_id for error in stage.heard.errors()] == ["two"]


async def test_a_failure_never_shows_the_key(tmp_path: Path) -> None:
    async with open_model_server() as model:
        model.play(Script(otherwise=Reply(status=401, body='{"error": "bad key sk-secret-1"}')))
        config = model_config(model.url)
        providers = config["providers"]
        assert isinstance(providers, dict)
        providers["demo"]["api_key"] = "sk-secret-1"
        async with open_stage(tmp_path, "unix", model, config=config) as stage:
            complete = await stage.heard.complete(await stage.prompt("Hi."))
            assert "[secret]" in complete.error
            await stage.catch_up()
            assert not any(b"sk-secret" in bytes(told.payload) for told in stage.heard.told)


# --- attachments


def attached(mime_type: str, content: bytes | str, count: int = 1) -> list[dict[str, object]]:
    text = content if isinstance(content, str) else base64.b64encode(content).decode()
    one: dict[str, object] = {"file_name": "f", "mime_type": mime_type, "content": text}
    return [one] * count


@pytest.mark.parametrize(
    ("attachments", "status"),
    [
        (attached("text/plain", b"x" * ((10 << 20) + 1)), 413),
        (attached("text/plain", b"x", count=101), 413),
        (attached("application/pdf", b"x"), 400),
        (attached("", b"x"), 400),
        (attached("text/plain", "not base64!"), 400),
        (attached("text/plain", "abc"), 400),
    ],
    ids=["too large", "too many", "unsupported", "untyped", "not base64", "cut base64"],
)
async def test_a_prompt_with_an_attachment_that_cannot_be_used_starts_nothing(
    tmp_path: Path, attachments: list[dict[str, object]], status: int
) -> None:
    async with open_runs(tmp_path) as stage:
        answer = await stage.post("Look.", attachments=attachments)
        assert answer.status == status
        assert (await stage.runs(), await stage.messages()) == ([], [])
        assert stage.model.requests == []


async def test_an_image_reaches_a_model_that_sees_and_is_kept_with_the_prompt(
    tmp_path: Path,
) -> None:
    image = attached("image/png", b"\x89PNG")
    async with open_runs(tmp_path, info={"supports_attachments": True}) as stage:
        await stage.heard.complete(await stage.prompt("Look.", attachments=image))
        assert "data:image/png;base64,iVBORw==" in str(stage.sent(1)[0].content)
        said = (await stage.messages())[0]
        assert [type(part).__name__ for part in said.parts] == [
            "TextPart", "BinaryPart", "FinishPart",
        ]  # fmt: skip
