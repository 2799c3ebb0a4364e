"""Maildir mailboxes: file-specific behavior and file-specific failures."""

import fcntl
import json
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.clock import format_time
from culm.errors import AppError
from culm.ids import LetterId
from culm.mail.base import (
    ClaimedLetter,
    ForeignMailbox,
    LetterState,
    MailboxBusy,
    MailboxFailed,
    NoMailbox,
)
from culm.mail.letters import (
    ABSURD_NS,
    LETTERS_MAX,
    POSITION_MAX,
    Letter,
    Sender,
    body_of,
    encode_letter,
    name_of,
)
from culm.mail.maildir import TEMP_AGE_S, Maildir, MaildirPostOffice, Subfolder
from culm.processes.linux import read_boot_id
from tests.support import WAIT_S, FakeClock, contract

ADDRESS = "agent-1"
CLOCK = FakeClock()
NOW_NS = int(CLOCK.now_s()) * 10**9


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Generator[None]:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, no paths
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "projects" / "key" / "mailboxes"


@pytest.fixture
def box(root: Path) -> Maildir:
    return MaildirPostOffice(root, CLOCK, lock_wait_s=0.0).make(ADDRESS)


def letter(letter_id: str) -> Letter:
    return Letter(
        id=LetterId(letter_id),
        from_=Sender("session-1"),
        kind="task",
        body=body_of("task", "do it"),
        created_at=format_time(CLOCK.now_s()),
    )


def ids(claims: list[ClaimedLetter]) -> list[str]:
    return [claim.letter.id for claim in claims]


def files_in(root: Path) -> list[str]:
    """All files, except the journal."""
    found = (path for path in root.rglob("*") if not path.is_dir() and path.name != ".seq")
    return sorted(path.relative_to(root).as_posix() for path in found)


@contextmanager
def limited(kind: int, soft: int) -> Generator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contract("FLEET-P1")
def test_delivery_syncs_file_before_rename_and_directory_after(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record the real calls by the paths of their descriptors."""
    calls: list[tuple[str, ...]] = []
    fsync, rename = os.fsync, os.rename

    def where(descriptor: int) -> str:
        at = Path(f"/proc/self/fd/{descriptor}").readlink()
        return at.relative_to(tmp_path).as_posix().removeprefix("projects/key/mailboxes/agent-1/")

    def observed_fsync(descriptor: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        calls.append((f"fsync {kind}", where(descriptor)))
        fsync(descriptor)

    def observed_rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        calls.append(("rename", f"{where(src_dir_fd)}/{source}", f"{where(dst_dir_fd)}/{target}"))
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", observed_fsync)
    monkeypatch.setattr(os, "rename", observed_rename)
    box = MaildirPostOffice(root, CLOCK).make(ADDRESS)
    parents = [("fsync directory", one) for one in (".", "projects", "projects/key")]
    assert calls == parents
    calls.clear()
    thread = threading.get_native_id()

    def expected_calls(name: str, *between: str) -> list[tuple[str, ...]]:
        temporary, place = f"tmp/{name}.{thread}", f"new/{name_of(NOW_NS + len(name) - 1, name)}"
        return [
            ("fsync file", temporary),
            *(("fsync directory", one) for one in between),
            ("rename", temporary, place),
            ("fsync directory", "new"),
        ]

    mailboxes = "projects/key/mailboxes"
    box.deliver(letter("a"))
    assert calls == expected_calls(
        "a", mailboxes, f"{mailboxes}/{ADDRESS}"
    )  # The first delivery of this boot.
    calls.clear()
    box.deliver(letter("bb"))
    assert calls == expected_calls("bb")
    calls.clear()
    assert box.deliver(letter("a")).again  # The first sender may have died before its sync.
    assert calls == [
        ("fsync file", f"tmp/a.{thread}"),
        ("fsync directory", "cur"),
        ("fsync directory", "new"),
    ]


def test_mailbox_is_private_and_letters_are_readable_json(root: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        box = MaildirPostOffice(root, CLOCK).make(ADDRESS)
        name = box.deliver(letter("a")).name
    finally:
        os.umask(before)
    modes = {
        path.relative_to(root).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "projects").rglob("*")
        if path.is_relative_to(root)
    }
    parts = ("", "/tmp", "/new", "/cur", "/corrupt", "/dead")
    assert modes == {
        ".": 0o700,
        **{f"{ADDRESS}{part}": 0o700 for part in parts},
        f"{ADDRESS}/.seq": 0o600,
        f"{ADDRESS}/new/{name}": 0o600,
    }
    text = (root / ADDRESS / "new" / name).read_text()
    assert text.startswith('{\n  "id": "a",\n  "from": {\n    "session_id": "session-1"\n  },\n')
    assert json.loads(text)["body"] == {"assignment": "do it"}


WRITER = """
import sys
from pathlib import Path
from culm.clock import LoopClock
from culm.mail.letters import Letter, Sender
from culm.mail.maildir import MaildirPostOffice
box = MaildirPostOffice(Path(sys.argv[1]), LoopClock()).open("agent-1")
print("ready", flush=True)
sys.stdin.readline()
for number in range(15):
    letter = Letter(
        id=f"{sys.argv[2]}-{number}",
        from_=Sender("s"),
        kind="task",
        body={"assignment": "do it"},
        created_at="2026-01-01T00:00:00Z",
    )
    print(box.deliver(letter).name)
"""


@contract("FLEET-69")
def test_concurrent_writers_lose_nothing_and_keep_their_order(box: Maildir, root: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b", "c")
    ]
    read: list[str] = []
    try:
        for one in writers:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        for one in writers:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        while len(read) < 45 and any(one.poll() is None for one in writers):
            claims = box.claim(5)
            read += [claim.name for claim in claims if box.ack(claim)]
        written = [one.communicate(timeout=WAIT_S)[0].split() for one in writers]
    finally:
        for one in writers:
            one.kill()
            one.communicate()
    read += [claim.name for claim in box.claim(100) if box.ack(claim)]
    # Letters are read in the order of their names.
    assert read == sorted(read) == sorted(name for names in written for name in names)
    assert (len(read), all(names == sorted(names) for names in written)) == (45, True)
    assert files_in(root) == []


BOOT = read_boot_id()
HEAD = f"culm {BOOT} {0:020d}\n".encode()
LINE = f"{NOW_NS:020d}-a\n".encode()
DAMAGED = {
    "empty": b"",
    "garbage": b"\xff\x00\xfe\n" * 99,
    "of another boot": HEAD.replace(BOOT[:8].encode(), b"00000000") + b"0" * 19 + b"1-a\n",
    "torn": HEAD + LINE + b"000018",
    "begun to be made anew": b"\x00" + HEAD[1:],
    "last line damaged": HEAD + LINE + b"what?\n",
    "far too long": HEAD + LINE * 50_000,
    "years ahead": HEAD + f"{NOW_NS + 10**18:020d}-z\n".encode(),
    "at its end": HEAD + f"{POSITION_MAX}-z\n".encode(),
    "says that it is full": HEAD + LINE * LETTERS_MAX,
}


@contract("FLEET-P3")
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_journal_is_rebuilt_without_reordering_letters(
    box: Maildir, root: Path, case: str
) -> None:
    for one in ("a", "b"):
        box.deliver(letter(one))
    claims = box.claim(1)
    (root / ADDRESS / ".seq").write_bytes(DAMAGED[case])
    names = [box.deliver(letter(one)).name for one in ("c", "d")]
    assert names == [name_of(NOW_NS + n, one) for n, one in ((2, "c"), (3, "d"))]
    assert ids(claims + box.claim(9)) == ["a", "b", "c", "d"]
    lines = "".join(f"{NOW_NS + n:020d}-{one}\n" for n, one in enumerate("abcd"))
    head, _, rest = (root / ADDRESS / ".seq").read_bytes().partition(b"\n")
    assert (head[:-20], rest) == (HEAD[:-21], lines.encode())


@contract("FLEET-P3")
def test_positions_do_not_decrease_when_the_journal_is_rebuilt(box: Maildir) -> None:
    ahead = replace(letter("x"), created_at=format_time(CLOCK.now_s() + 50))
    *_, last = [box.deliver(replace(ahead, id=LetterId(f"l{n}"))) for n in range(LETTERS_MAX)]
    for claim in box.claim(LETTERS_MAX):
        box.ack(claim)
    assert box.deliver(letter("after")).name[:20] > last.name[:20]


@contract("FLEET-P3")
@pytest.mark.parametrize("place", [NOW_NS + ABSURD_NS + 1, POSITION_MAX])
def test_letter_named_far_in_the_future_does_not_affect_order(
    box: Maildir, root: Path, place: int
) -> None:
    (root / ADDRESS / "new" / name_of(place, "a")).write_bytes(encode_letter(letter("a")))
    names = [box.deliver(letter(one)).name for one in ("d", "c", "b")]
    assert names == [name_of(NOW_NS + n, one) for n, one in enumerate("dcb")]
    assert ids(box.claim(9)) == ["d", "c", "b", "a"]


@pytest.mark.parametrize("part", [part.value for part in Subfolder])
def test_missing_mailbox_folder_is_recreated_by_its_owner(
    box: Maildir, root: Path, part: str
) -> None:
    box.deliver(letter("a"))
    for path in (root / ADDRESS / part).iterdir():
        path.unlink()
    (root / ADDRESS / part).rmdir()
    box.recover()
    box.deliver(letter("b"))
    claims = box.claim(9)
    assert ids(claims)[-1] == "b"
    assert box.bury(claims[-1])


def test_temp_files_of_a_dead_writer_are_not_read_and_are_removed(box: Maildir, root: Path) -> None:
    temps = root / ADDRESS / "tmp"
    own = f"a.{threading.get_native_id()}"  # Left by a thread with the same id.
    for name, age_s in ((own, 0.0), ("old.1", TEMP_AGE_S + 1), ("young.2", TEMP_AGE_S - 1)):
        (temps / name).write_bytes(b"half a let")
        os.utime(temps / name, (CLOCK.now_s() - age_s, CLOCK.now_s() - age_s))
    journal = root / ADDRESS / ".seq"
    journal.write_bytes(HEAD + f"{NOW_NS:020d}-a\n".encode())  # Its letter was about to be moved.
    assert box.deliver(letter("a")).name == name_of(NOW_NS + 1, "a")
    assert (ids(box.claim(9)), ids(box.recover())) == (["a"], ["a"])
    assert files_in(root / ADDRESS / "tmp") == ["young.2"]


def test_delivery_refused_by_the_disk_leaves_nothing(
    box: Maildir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with limited(resource.RLIMIT_FSIZE, 64), pytest.raises(MailboxFailed):
        box.deliver(letter("a"))
    fsync = os.fsync

    def broken(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "the disk is broken")
        fsync(descriptor)

    box.deliver(letter("b"))
    box.ack(box.claim(1)[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(MailboxFailed, match="the disk is broken"):
            box.deliver(letter("a"))
    assert (files_in(root), box.pending_count()) == ([], 0)
    box.deliver(letter("a"))
    assert ids(box.claim(9)) == ["a"]


def test_lack_of_descriptors_does_not_mark_letters_corrupt(box: Maildir) -> None:
    for one in ("a", "b"):
        box.deliver(letter(one))
    spare = [os.dup(0) for _ in range(64)]  # Fills the gaps.
    try:
        with limited(resource.RLIMIT_NOFILE, max(spare) + 1):
            for _ in range(4):  # Enough for the directories, not for a letter.
                os.close(spare.pop())
            with pytest.raises(MailboxFailed):
                box.claim(9)
    finally:
        for one in spare:
            os.close(one)
    assert (box.pending_count(), box.recover(), ids(box.claim(9))) == (2, [], ["a", "b"])


def test_locked_mailbox_is_busy_and_nothing_is_left(box: Maildir, root: Path) -> None:
    with (root / ADDRESS / ".seq").open("ab") as seq:
        fcntl.flock(seq, fcntl.LOCK_EX)
        for act in (lambda: box.deliver(letter("a")), lambda: post_of(root).remove(ADDRESS)):
            with pytest.raises(MailboxBusy):
                act()
    assert (files_in(root), box.deliver(letter("a")).again) == ([], False)


def test_removal_deletes_every_letter_and_later_ones_find_no_mailbox(
    box: Maildir, root: Path
) -> None:
    patient = MaildirPostOffice(root, CLOCK)
    begun, errors = threading.Semaphore(0), list[AppError]()

    def write(writer: int) -> None:
        try:
            for number in range(20):
                patient.open(ADDRESS).deliver(letter(f"{writer}-{number}"))
                begun.release()
        except AppError as exc:
            errors.append(exc)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for one in writers:
        one.start()
    assert all(begun.acquire(timeout=WAIT_S) for _ in range(6))
    assert patient.remove(ADDRESS)
    for one in writers:
        one.join(WAIT_S)
    assert ({type(one) for one in errors} - {NoMailbox}, [*root.iterdir()]) == (set(), [])
    with pytest.raises(NoMailbox):
        box.deliver(letter("late"))


def post_of(root: Path) -> MaildirPostOffice:
    return MaildirPostOffice(root, CLOCK, lock_wait_s=0.0)


def make_big(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def make_link(path: Path) -> None:
    target = path.parent.parent / "elsewhere"
    target.write_bytes(encode_letter(letter("x")))
    path.symlink_to(target)


ODD: dict[str, Callable[[Path], None]] = {
    "directory": lambda path: (path / "inside").mkdir(parents=True),
    "pipe": os.mkfifo,
    "link": make_link,
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "huge": make_big,
}


@contract("FLEET-72")
@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("name", [name_of(1, "x"), "\udcff x", "z" * 255])
def test_foreign_entry_is_moved_to_corrupt_and_letters_still_arrive(
    box: Maildir, root: Path, case: str, name: str
) -> None:
    folder = root / ADDRESS
    for _ in range(2):  # Also if the name exists in corrupt/ already.
        ODD[case](folder / "new" / name)
        box.deliver(letter("a"))
        (claim,) = box.claim(9)
        assert claim.letter.id == "a"
        assert box.ack(claim)
        assert (box.recover(), box.pending_count()) == ([], 0)
        (folder / "elsewhere").unlink(missing_ok=True)
    assert [path.name for path in (folder / "corrupt").iterdir()] == [name]
    assert post_of(root).remove(ADDRESS)


def change_owner(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(folder, 12345, -1)


def replace_by_link(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.symlink_to("moved", target_is_directory=True)


def replace_by_file(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.touch()


UNSAFE: dict[str, Callable[[Path], None]] = {
    "of another user": change_owner,
    "writable by the group": lambda folder: folder.chmod(0o770),
    "writable by all": lambda folder: folder.chmod(0o702),
    "a link": replace_by_link,
    "a file": replace_by_file,
}


@pytest.mark.parametrize("case", UNSAFE)
@pytest.mark.parametrize("part", ["", ADDRESS, f"{ADDRESS}/tmp", f"{ADDRESS}/new"])
def test_mailbox_accessible_to_others_is_refused(
    box: Maildir, root: Path, case: str, part: str
) -> None:
    box.deliver(letter("a"))
    UNSAFE[case](root / part)
    with pytest.raises(ForeignMailbox) as refused:
        box.deliver(letter("b"))
    assert (refused.value.code, refused.value.status) == ("mailbox_foreign", 403)
    if not part.endswith("tmp"):
        with pytest.raises(ForeignMailbox):
            box.claim(9)
    if part in ("", ADDRESS):
        for act in (post_of(root).open, post_of(root).make, post_of(root).remove):
            with pytest.raises(ForeignMailbox):
                act(ADDRESS)
    found = [path.name for path in root.parent.rglob("*-?.json") if path.is_file()]
    assert {*found} == {name_of(NOW_NS, "a")}


@pytest.mark.parametrize("case", ["link", "directory", "pipe", "link to nowhere"])
def test_journal_that_is_not_a_regular_file_is_refused(box: Maildir, root: Path, case: str) -> None:
    ODD[case](root / ADDRESS / ".seq")
    with pytest.raises(ForeignMailbox):
        box.deliver(letter("b"))
    assert box.pending_count() == 0


def test_partially_created_mailbox_is_completed(root: Path) -> None:
    (root / ADDRESS / "new").mkdir(parents=True, mode=0o700)
    box = post_of(root).open(ADDRESS)
    with pytest.raises(NoMailbox):
        box.deliver(letter("a"))
    assert post_of(root).addresses(claimed=True) == []
    post_of(root).make(ADDRESS)
    box.deliver(letter("a"))
    assert (ids(box.claim(9)), box.find("a")) == (["a"], LetterState.CLAIMED)
    assert post_of(root).addresses(claimed=True) == [ADDRESS]


def test_scan_skips_entries_that_are_not_mailboxes(box: Maildir, root: Path) -> None:
    assert post_of(root / "none").addresses() == []
    (root / "file").touch()
    with pytest.raises(MailboxFailed):
        post_of(root / "file").addresses()
    (root / ".hidden" / "new").mkdir(parents=True)
    (root / ".hidden" / "new" / "x").touch()
    (root / ADDRESS / "new" / ".begun").touch()
    assert post_of(root).addresses(claimed=True) == []
    box.deliver(letter("a"))
    assert post_of(root).addresses() == [ADDRESS]


@pytest.mark.parametrize("case", ["a file", "a link"])
def test_unusable_corrupt_folder_is_logged_and_letters_still_arrive(
    box: Maildir, root: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    UNSAFE[case](root / ADDRESS / "corrupt")
    (root / ADDRESS / "new" / name_of(1, "x")).write_bytes(b"no letter")
    box.deliver(letter("a"))
    assert ids(box.claim(9)) == ["a"]
    assert ids(box.recover()) == ["a"]
    assert "moved to corrupt" not in caplog.text
    assert "cannot move to corrupt/" in caplog.text
