"""What a mirror makes of events, one after the other."""

from collections.abc import Mapping

import msgspec

from culm.client.mirror import Mirror
from culm.client.stream import ServerEvent
from culm.wire.codec import Json, encode


def _told(type_: str, payload: Mapping[str, Json], op: str = "updated") -> ServerEvent:
    return ServerEvent(type_, op, msgspec.Raw(encode(payload)))


def test_with_a_session_goes_all_that_is_about_it() -> None:
    """Of what is deleted with it only the session's own end is told."""
    mirror, kept = Mirror(), Mirror()
    for one in (mirror, kept):
        _fill(one, "stays")
    _fill(mirror, "goes")
    mirror.apply(_told("session", {"id": "goes"}, "deleted"))
    assert vars(mirror) == vars(kept)


def _fill(mirror: Mirror, name: str) -> None:
    run_id = f"run of {name}"
    run = {"run_id": run_id, "session_id": name, "state": "queued", "seq": 1}
    retry = {"run_id": run_id, "session_id": name, "delay_s": 1, "title": "Busy"}
    queue = {"session_id": name, "items": [{"run_id": run_id, "prompt": "Do it."}]}
    agent = {"agent_id": f"agent of {name}", "parent_id": "", "session_id": name}
    ids = {"session_id": name, "run_id": run_id, "tool_call_id": "c", "state": "open"}
    ask = {"ask_id": f"ask of {name}", "tool_name": "t", "action": "a", **ids}
    mirror.apply(_told("session", {"id": name}))
    mirror.apply(_told("message", {"id": f"m of {name}", "role": "user", "session_id": name}))
    mirror.apply(_told("run_changed", {**run, "run_id_given": False}))
    mirror.apply(_told("run_retry", retry))
    mirror.apply(_told("queue_changed", queue))
    mirror.apply(_told("agent_started", agent))
    mirror.apply(_told("ask_changed", {**ask, "description": "", "digest": ""}))
    mirror.apply(_told("question_changed", {"batch_id": f"batch of {name}", **ids}))
