"""/proc parsing, packets between the processes, and process trees."""

import os
import signal
import socket
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from culm.processes.linux import (
    ProcStat,
    descendants_of,
    end_one,
    find_process_tag,
    find_stat,
    groups_of,
    is_alive,
    parse_process_tag,
    parse_stat,
    parse_token,
    read_table,
    start_ticks_of,
)
from culm.processes.packets import (
    SpawnCommand,
    encode_command,
    encode_ended,
    parse_command,
    parse_ended,
    receive,
    receive_or_end,
    receive_with,
    send,
    send_with,
)

COUNTS = st.integers(0, 1 << 40)
TEXTS = st.binary(max_size=20).filter(lambda text: b"\0" not in text)


def values(thing: object, names: tuple[str, ...]) -> list[object]:
    return [getattr(thing, name) for name in names]


@given(pid=COUNTS, parent=COUNTS, group=COUNTS, ticks=COUNTS, pages=COUNTS, name=st.binary())
def test_stat_is_parsed_whatever_the_process_name(
    pid: int, parent: int, group: int, ticks: int, pages: int, name: bytes
) -> None:
    rest = [b"S", parent, group, *[7] * 16, ticks, 8, pages, *[9] * 20]
    fields = b" ".join(one if isinstance(one, bytes) else str(one).encode() for one in rest)
    stat = parse_stat(b"%d (%b) %b\n" % (pid, name, fields), page_bytes=2)
    assert stat is not None
    found = stat.pid, stat.parent, stat.group, stat.start_ticks, stat.rss_bytes, stat.state
    assert found == (pid, parent, group, ticks, pages * 2, "S")
    assert stat.comm == name.decode("utf-8", "replace")


@given(st.binary())
def test_invalid_proc_lines_are_not_parsed(line: bytes) -> None:
    assert parse_stat(line) is None
    assert parse_token(line) is None
    assert parse_process_tag(line) is None


def test_process_tag_and_token_are_parsed() -> None:
    row = b"Max cpu time  unlimited  unlimited  seconds\nMax realtime timeout      %b us\n"
    assert parse_process_tag(row % b"5                    77                  ") == 77
    assert parse_process_tag(row % b"unlimited            unlimited           ") is None
    assert parse_token(b"A=CULM_PROCESS_TOKEN=1\0CULM_PROCESS_TOKEN=ab.7\0B=") == "ab.7"
    assert parse_token(b"A=CULM_PROCESS_TOKEN=1\0") is None


def test_own_process_is_found_and_a_missing_one_is_not() -> None:
    own = find_stat(os.getpid())
    assert own is not None
    assert (own.parent, own.is_alive, own.pid in read_table()) == (os.getppid(), True, True)
    assert (find_stat(1 << 30), find_process_tag(1 << 30)) == (None, None)


def make_stat(pid: int, parent: int, group: int = 1) -> ProcStat:
    return ProcStat(pid, "name", "S", parent, group, 0, 0)


def test_descendants_are_found_in_an_inconsistent_table() -> None:
    parents = {2: 1, 3: 2, 4: 3, 5: 2, 6: 1, 7: 8, 8: 7, 9: 9}
    table = {pid: make_stat(pid, parent) for pid, parent in parents.items()}
    assert [stat.pid for stat in descendants_of(2, table)] == [3, 5, 4]
    assert [stat.pid for stat in descendants_of(7, table)] == [8]
    assert descendants_of(10, table) == []


def test_own_process_group_is_never_ended() -> None:
    members = [make_stat(5, 2, group) for group in (5, 6, 5, 9, 1, 0)]
    assert groups_of(members, own=9) == [5, 6]


@given(argv=st.lists(TEXTS), cwd=TEXTS, env=st.lists(TEXTS), files=st.integers())
def test_command_round_trips(argv: list[bytes], cwd: bytes, env: list[bytes], files: int) -> None:
    command = parse_command(encode_command(SpawnCommand(argv, cwd, env, files)))
    assert (command.argv, command.cwd, command.env, command.files) == (argv, cwd, env, files)


@given(
    code=st.none() | COUNTS,
    number=st.none() | COUNTS,
    swept=COUNTS,
    left=st.lists(COUNTS, max_size=100),
    lost=st.booleans(),
)
def test_command_end_round_trips(
    code: int | None, number: int | None, swept: int, left: list[int], *, lost: bool
) -> None:
    kind, *fields = encode_ended(code, number, swept, left, lost=lost).decode().split(" ")
    assert (kind, parse_ended(fields)) == ("ended", (code, number, swept, left, lost))


def test_packets_of_a_dead_peer_are_received() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert receive(ours) == ([], False)
        assert send(ours, b"kill 5")
        assert send(theirs, b"ended 1")
        assert send(theirs, b"and more")
        theirs.close()
        assert receive(ours) == ([["ended", "1"], ["and", "more"]], True)
        assert not send(ours, b"kill 5")


def test_descriptors_arrive_in_order_and_are_not_inheritable() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pipes = [os.pipe() for _ in range(100)]
        ends = [end for pipe in pipes for end in pipe]
        send_with(ours, b"start 1 200", ends)
        packet, passed = receive_with(theirs)
        same = [os.path.sameopenfile(a, b) for a, b in zip(ends, passed, strict=True)]
        assert (packet, all(same)) == (b"start 1 200", True)
        assert not any(os.get_inheritable(descriptor) for descriptor in passed)
        for descriptor in (*ends, *passed):
            os.close(descriptor)


def test_receive_distinguishes_silence_from_the_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert receive_or_end(ours) is None
        send(theirs, b"word")
        assert receive_or_end(ours) == (b"word", [])
        send(ours, b"never read")
        theirs.close()
        # First the error that not all was read, then the end: it is over either way.
        assert [receive_or_end(ours), receive_or_end(ours)] == [(b"", []), (b"", [])]


def test_process_is_ended_only_if_its_start_time_matches() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pid, ticks = process.pid, start_ticks_of(process.pid)
        assert [is_alive(pid, ticks), is_alive(pid, ticks + 1)] == [True, False]
        assert [end_one(pid, ticks + 1), process.poll()] == [False, None]
        assert [end_one(pid, ticks), process.wait()] == [True, -signal.SIGKILL]
        assert [is_alive(pid, ticks), end_one(pid, ticks), start_ticks_of(pid)] == [False, False, 0]
