"""Discovery records, as files and in memory: both pass the same tests."""

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.clock import format_time, parse_time
from culm.files import UnsafeName
from culm.fleet.discovery.base import (
    LEASE_S,
    AgentRecord,
    Discovery,
    OwnerProcess,
    ProcessPlace,
    is_live,
    renewed,
)
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.discovery.memory import MemoryDiscovery
from culm.fleet.provision import Identity
from culm.fleet.worker.lifecycle import make_record
from tests.support import FakeClock, contract


def record(agent_id: str, clock: FakeClock, role: str = "r", *labels: str) -> AgentRecord:
    return renewed(
        AgentRecord(
            agent_id=agent_id,
            role=role,
            labels=[*labels],
            endpoint="ws://127.0.0.1:1",
            pid=7,
            version="1",
            started_at=format_time(clock.now_s()),
            lease_expires_at="",
            culm=ProcessPlace(5, "boot", OwnerProcess(6, 4)),
        ),
        clock.now_s(),
    )


@pytest.fixture(params=["files", "memory"])
def discovery(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Discovery:
    return (
        FileDiscovery(tmp_path / "f", clock) if request.param == "files" else MemoryDiscovery(clock)
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@contract("FLEET-58")
def test_published_records_are_found_in_order_until_withdrawn(
    discovery: Discovery, clock: FakeClock
) -> None:
    one, two = record("b", clock, "writer", "fast"), record("a", clock, "reader", "fast", "dear")
    assert (discovery.discover(), discovery.gc(), discovery.resolve("a")) == ([], 0, None)
    discovery.publish(one)
    discovery.publish(two)
    assert discovery.discover() == [two, one]
    assert discovery.discover(role="writer") == [one]
    assert discovery.discover(label="dear") == [two]
    assert discovery.discover(role="writer", label="dear") == []
    assert discovery.resolve("b") == one
    discovery.withdraw("b")
    discovery.withdraw("b")
    assert discovery.discover() == [two]
    assert discovery.resolve("b") is None


@contract("FLEET-59")
def test_expired_record_is_not_found_and_gc_removes_only_it(
    discovery: Discovery, clock: FakeClock
) -> None:
    dead, live = record("a", clock), record("b", clock)
    discovery.publish(dead)
    clock.advance(LEASE_S)  # Not in the future any more.
    live = renewed(live, clock.now_s())
    discovery.publish(live)
    assert (discovery.discover(), discovery.resolve("a")) == ([live], None)
    assert (discovery.gc(), discovery.gc()) == (1, 0)
    clock.advance(-LEASE_S)
    assert discovery.discover() == [live]


@contract("FLEET-59")
def test_expired_record_of_a_live_process_is_hidden_but_kept(
    tmp_path: Path, clock: FakeClock
) -> None:
    discovery = FileDiscovery(tmp_path, clock)
    asleep = make_record(Identity("asleep"), [], "ws://e", None, clock.now_s())
    assert asleep.culm is not None
    later = replace(asleep.culm, start_ticks=asleep.culm.start_ticks + 1)
    ended = replace(asleep, agent_id="ended", culm=later)  # Another process has its pid now.
    for one in (asleep, ended):
        discovery.publish(one)
        discovery.token_file(one.agent_id).touch()
    clock.advance(LEASE_S)
    assert (discovery.discover(), discovery.gc(), discovery.records()) == ([], 1, [asleep])
    assert sorted(one.name for one in tmp_path.iterdir()) == [".asleep.token", "asleep.json"]


@contract("FLEET-P2")
@pytest.mark.parametrize("agent_id", ["../a", "", ".a", "a/b", "a..b"])
def test_unsafe_id_is_refused(discovery: Discovery, clock: FakeClock, agent_id: str) -> None:
    for act in (discovery.withdraw, discovery.resolve):
        with pytest.raises(UnsafeName):
            act(agent_id)
    with pytest.raises(UnsafeName):
        discovery.publish(record(agent_id, clock))


def test_record_is_a_private_readable_json_file(tmp_path: Path, clock: FakeClock) -> None:
    discovery = FileDiscovery(tmp_path / "data" / "fabric", clock)
    discovery.publish(record("a", clock))
    file = tmp_path / "data" / "fabric" / "a.json"
    assert [one.name for one in file.parent.iterdir()] == ["a.json"]
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    text = file.read_text()
    assert text.splitlines()[1] == '  "agent_id": "a",'
    assert json.loads(text) == {
        "agent_id": "a",
        "role": "r",
        "labels": [],
        "endpoint": "ws://127.0.0.1:1",
        "pid": 7,
        "version": "1",
        "started_at": "2027-01-15T08:00:00.000Z",
        "lease_expires_at": "2027-01-15T08:01:00.000Z",
        "culm": {"start_ticks": 5, "world": "boot", "owner": {"pid": 6, "start_ticks": 4}},
    }


@contract("FLEET-59")
def test_gc_removes_unreadable_records_and_keeps_other_files(
    tmp_path: Path, clock: FakeClock
) -> None:
    discovery = FileDiscovery(tmp_path, clock)
    known = record("known", clock)
    discovery.publish(known)
    foreign = {"later": 1, **json.loads((tmp_path / "known.json").read_text())}
    del foreign["culm"], foreign["labels"], foreign["version"]
    (tmp_path / "foreign.json").write_text(json.dumps({**foreign, "agent_id": "foreign"}))
    (tmp_path / "broken.json").write_bytes(b"{")
    (tmp_path / "other.json").write_text(json.dumps(foreign))  # Its content names another agent.
    (tmp_path / "huge.json").write_bytes(b" " * (1 << 17))
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / ".broken.token").touch()
    kept = [".hidden.json", "notes.txt", ".known.token", ".late.json.tmp.7"]
    kept.append(".never.json.tmp.x.token")  # The token of an agent with such an id.
    for name in kept:
        (tmp_path / name).touch()
    old = tmp_path / ".old.json.tmp.8"
    old.touch()
    os.utime(tmp_path / ".late.json.tmp.7", (clock.now_s(), clock.now_s()))
    os.utime(old, (0, 0))
    (tmp_path / ".never.json.tmp.7").touch()
    (tmp_path / "..never.token.tmp.7").touch()
    os.utime(tmp_path / "..never.token.tmp.7", (0, 0))
    discovery.withdraw("never")
    discovery.withdraw("known.json")  # Not the record whose file has that name.
    expected = replace(known, agent_id="foreign", labels=[], version="", culm=None)
    assert discovery.discover() == discovery.records() == [expected, known]
    clock.advance(LEASE_S)
    assert (discovery.discover(), discovery.records()) == ([], [expected, known])
    clock.advance(-LEASE_S)
    assert discovery.gc() == 4
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(
        [*kept, "known.json", "foreign.json"]
    )


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("1970-01-01T00:00:01Z", 1.0),
        ("1970-01-01T00:00:01.500Z", 1.5),
        ("1970-01-01T00:00:01.250000999Z", 1.25),
        ("1970-01-01T01:00:01+01:00", 1.0),
        ("1970-01-01T00:00:01", None),
        ("soon", None),
        ("", None),
    ],
)
def test_times_parse_in_any_precision_and_only_with_a_zone(
    text: str, at_s: float | None, clock: FakeClock
) -> None:
    assert parse_time(text) == at_s
    assert not is_live(replace(record("a", clock), lease_expires_at=text), clock.now_s())
