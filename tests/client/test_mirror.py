"""A mirror applies events in order."""

from collections.abc import Mapping

import msgspec

from culm.client.mirror import Mirror
from culm.client.stream import ServerEvent
from culm.wire.codec import Json, encode


def _event(type_: str, payload: Mapping[str, Json], op: str = "updated") -> ServerEvent:
    return ServerEvent(type_, op, msgspec.Raw(encode(payload)))


def test_deleted_session_takes_all_its_state_with_it() -> None:
    """The server publishes only the deletion of the session itself."""
    mirror, expected = Mirror(), Mirror()
    for one in (mirror, expected):
        _fill(one, "stays")
    _fill(mirror, "goes")
    mirror.apply(_event("session", {"id": "goes"}, "deleted"))
    assert vars(mirror) == vars(expected)


def _fill(mirror: Mirror, name: str) -> None:
    run_id = f"run of {name}"
    run = {"run_id": run_id, "session_id": name, "state": "queued", "seq": 1}
    retry = {"run_id": run_id, "session_id": name, "delay_s": 1, "title": "Busy"}
    queue = {"session_id": name, "items": [{"run_id": run_id, "prompt": "Do it."}]}
    agent = {"agent_id": f"agent of {name}", "parent_id": "", "session_id": name}
    ids = {"session_id": name, "run_id": run_id, "tool_call_id": "c", "state": "open"}
    ask = {"ask_id": f"ask of {name}", "tool_name": "t", "action": "a", **ids}
    mirror.apply(_event("session", {"id": name}))
    mirror.apply(_event("message", {"id": f"m of {name}", "role": "user", "session_id": name}))
    mirror.apply(_event("run_changed", {**run, "run_id_given": False}))
    mirror.apply(_event("run_retry", retry))
    mirror.apply(_event("queue_changed", queue))
    mirror.apply(_event("agent_started", agent))
    mirror.apply(_event("ask_changed", {**ask, "description": "", "digest": ""}))
    mirror.apply(_event("question_changed", {"batch_id": f"batch of {name}", **ids}))
