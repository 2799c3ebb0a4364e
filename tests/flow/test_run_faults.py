"""Models that fail during a run: retried, or ended with an error; never a hang."""

import base64
import socket
from pathlib import Path

import pytest

from culm.settings import Settings
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Script
from culm.wire.runs import RunRetry
from tests.flow.probes import TITLE, script
from tests.flow.reading import finish_of
from tests.flow.runs import Harness, open_harness, open_runs
from tests.support import contract, model_config

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)
PAUSES = (5.0, 10.0, 20.0)


async def assert_failed(harness: Harness, run_id: str, title: str, *texts: str) -> None:
    """The run ended with a title and readable details, published once."""
    complete = await harness.received.complete(run_id)
    run = await harness.run(run_id)
    assert (run.outcome, run.title) == ("error", title)
    assert run.details
    assert complete.error == f"{title}: {run.details}"
    for text in texts:
        assert text in run.details
    finish = finish_of((await harness.messages())[-1])
    assert (finish.reason, finish.message, finish.details) == ("error", title, run.details)
    await harness.catch_up()
    assert harness.received.completed().count(run_id) == 1
    assert [error.run_id for error in harness.received.errors()] == [run_id]
    assert not (await harness.session()).is_busy


async def assert_usable(harness: Harness) -> None:
    harness.model.play(script())
    assert (await harness.received.complete(await harness.prompt("Again."))).text == "Fine."


# --- models


@contract("INV-39")
@pytest.mark.parametrize(
    ("reply", "title", "text"),
    [
        (Reply(status=401), "Authentication problem", "refused the key"),
        (Reply(status=403), "Authentication problem", "refused the key"),
        (Reply(status=400), "The provider refused", "400"),
        (Reply(status=404), "Model or address not found", "demo-1"),
        (Reply(status=429, headers={"Retry-After": "3600"}), "Too many requests", "429"),
        (Reply(deltas=["a ", "b"], malformed_after=1), "Unreadable answer", "not part"),
        (Reply(long_line_bytes=10 << 20), "Unreadable answer", "demo"),
        (Reply(body="<html>Hello</html>"), "Unreadable answer", "instead of a stream"),
        (Reply(status=302, headers={"Location": "http://a.test"}), "The provider has moved", "302"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_permanent_model_error_ends_the_run_at_once(
    tmp_path: Path, reply: Reply, title: str, text: str
) -> None:
    async with open_runs(tmp_path, play=script(reply)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.complete(run_id)
        assert len(harness.seen()) == 1
        await assert_failed(harness, run_id, title, text)
        await assert_usable(harness)


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
async def test_transient_model_error_is_tried_four_times_and_then_ends_the_run(
    tmp_path: Path, reply: Reply, title: str
) -> None:
    async with open_runs(tmp_path, play=Script([], [TITLE], reply)) as harness:
        run_id = await harness.prompt("Hi.")
        for n, pause_s in enumerate(PAUSES):
            await harness.clock.pass_retry(pause_s, less_s=0.1)
            await harness.flow.run_ready()
            assert len(harness.seen()) == n + 1
            harness.clock.advance(0.2)
        await assert_failed(harness, run_id, title)
        assert len(harness.seen()) == 4
        await assert_usable(harness)


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
async def test_stalled_model_is_tried_four_times_and_then_ends_the_run(
    tmp_path: Path, reply: Reply
) -> None:
    settings = Settings(model_first_byte_s=0.1, model_stall_s=0.1)
    async with open_runs(tmp_path, play=Script([], [TITLE], reply), settings=settings) as harness:
        run_id = await harness.prompt("Hi.")
        for pause_s in PAUSES:
            await harness.clock.pass_retry(pause_s)
        await assert_failed(harness, run_id, "The provider stopped answering")
        # Not the requests that the server has seen: on a busy machine one may stall on its way.
        assert len(harness.received.all("run_retry", RunRetry)) == len(PAUSES)


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
async def test_successful_retry_leaves_only_the_final_answer(
    tmp_path: Path, reply: Reply, pause_s: float
) -> None:
    # Long enough for the final answer on a busy machine.
    settings = Settings(model_stall_s=120.0 if reply.stall_after is None else 1.0)
    async with open_runs(tmp_path, play=script(reply), settings=settings) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.clock.pass_retry(pause_s)
        complete = await harness.received.complete(run_id)
        assert (complete.text, complete.error) == ("Fine.", "")
        assert await harness.rows() == [("user", "Hi.", "stop"), ("assistant", "Fine.", "end_turn")]
        assert harness.received.errors() == []
        assert len(harness.seen()) == 2


async def test_unknown_stream_event_is_skipped(tmp_path: Path) -> None:
    play = script(Reply(text="All is well.", unknown_event=True))
    async with open_runs(tmp_path, play=play) as harness:
        assert (await harness.received.complete(await harness.prompt("Hi."))).text == "All is well."


async def test_unreachable_provider_is_retried_and_then_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound and not listening, so connections are refused.
        config = model_config(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        async with (
            open_model_server() as model,
            open_harness(tmp_path, "unix", model, config=config) as harness,
        ):
            run_id = await harness.prompt("Hi.")
            for pause_s in PAUSES:
                await harness.clock.pass_retry(pause_s)
            complete = await harness.received.complete(run_id)
            assert complete.error.startswith("No connection: 127.0.0.1:")


@contract("INV-36")
async def test_queued_run_with_a_disabled_provider_ends_with_an_error(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        await harness.prompt("One.", run_id="one")
        await harness.received.text("Hello")
        await harness.prompt("Two.", run_id="two")
        change = {"scope": 1, "key": "providers.demo.disable", "value": True}
        assert (await harness.request("POST", "/config/set", change)).status == 200
        harness.model.release()
        await harness.received.complete("two")
        run = await harness.run("two")
        assert (run.outcome, run.title) == ("error", "Model not available")
        assert "provider 'demo' is disabled\nhint: culm models" in run.details
        assert (await harness.rows())[2:] == [("user", "Two.", "stop"), ("assistant", "", "error")]
        await harness.catch_up()
        assert harness.received.completed() == ["one", "two"]
        assert [error.run_id for error in harness.received.errors()] == ["two"]


async def test_failure_never_shows_the_key(tmp_path: Path) -> None:
    async with open_model_server() as model:
        model.play(Script(otherwise=Reply(status=401, body='{"error": "bad key sk-secret-1"}')))
        config = model_config(model.url)
        providers = config["providers"]
        assert isinstance(providers, dict)
        providers["demo"]["api_key"] = "sk-secret-1"
        async with open_harness(tmp_path, "unix", model, config=config) as harness:
            complete = await harness.received.complete(await harness.prompt("Hi."))
            assert "[secret]" in complete.error
            await harness.catch_up()
            assert not any(
                b"sk-secret" in bytes(event.payload) for event in harness.received.events
            )


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
async def test_prompt_with_an_unusable_attachment_starts_nothing(
    tmp_path: Path, attachments: list[dict[str, object]], status: int
) -> None:
    async with open_runs(tmp_path) as harness:
        answer = await harness.post("Look.", attachments=attachments)
        assert answer.status == status
        assert (await harness.runs(), await harness.messages()) == ([], [])
        assert harness.model.requests == []


async def test_image_reaches_a_vision_model_and_is_stored_with_the_prompt(
    tmp_path: Path,
) -> None:
    image = attached("image/png", b"\x89PNG")
    async with open_runs(tmp_path, info={"supports_attachments": True}) as harness:
        await harness.received.complete(await harness.prompt("Look.", attachments=image))
        assert "data:image/png;base64,iVBORw==" in str(harness.sent(1)[0].content)
        prompt = (await harness.messages())[0]
        assert [type(part).__name__ for part in prompt.parts] == [
            "TextPart", "BinaryPart", "FinishPart",
        ]  # fmt: skip
