"""One suite for both mailbox implementations: maildir and memory."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.clock import format_time
from culm.errors import AppError
from culm.ids import LetterId
from culm.mail.base import (
    KEPT_MAX,
    ClaimedLetter,
    Delivered,
    LetterIdTaken,
    LetterState,
    Mailbox,
    MailboxFull,
    NoMailbox,
    PostOffice,
    UnsafeAddress,
)
from culm.mail.letters import (
    BODY_LEVELS_MAX,
    LETTER_BYTES_MAX,
    LETTERS_MAX,
    BadLetter,
    Letter,
    LetterTooLarge,
    Sender,
    body_of,
    encode_letter,
    is_expired,
    mode_of,
    name_of,
    parse_letter,
    text_of,
)
from culm.mail.maildir import MaildirPostOffice
from culm.mail.memory import MemoryPostOffice
from culm.wire.agents import LetterKind
from tests.contract.admitted_letters import ADMITTED_MAX, AdmittedLetters, parse_admitted
from tests.support import WAIT_S, FakeClock, contract

ADDRESS = "agent-1"
CLOCK = FakeClock()


def letter(letter_id: str, *, kind: LetterKind = "task", created_s: float | None = None) -> Letter:
    return Letter(
        id=LetterId(letter_id),
        from_=Sender("session-1", role="worker"),
        kind=kind,
        body=body_of(kind, f"what {letter_id} says"),
        created_at=format_time(CLOCK.now_s() if created_s is None else created_s),
    )


@dataclass
class MailboxHarness:
    """Mailboxes of one kind, and a function to plant foreign letters in them."""

    post: PostOffice
    plant: Callable[[str, bytes], None]

    def make(self) -> Mailbox:
        return self.post.make(ADDRESS)


def memory_harness() -> MailboxHarness:
    post = MemoryPostOffice(CLOCK)
    return MailboxHarness(post, lambda name, data: post.open(ADDRESS).plant(name, data))


def files_harness(folder: Path) -> MailboxHarness:
    written: dict[bytes, Path] = {}

    def plant(name: str, data: bytes) -> None:
        file = folder / ADDRESS / "new" / name
        if data not in written:  # A thousand links cost the disk less than a thousand files.
            written[data] = folder / f"planted-{len(written)}"
            written[data].write_bytes(data)
        file.hardlink_to(written[data])

    return MailboxHarness(MaildirPostOffice(folder, CLOCK), plant)


@pytest.fixture(params=["files", "memory"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> MailboxHarness:
    return memory_harness() if request.param == "memory" else files_harness(tmp_path / "mailboxes")


def ids(claims: list[ClaimedLetter]) -> list[str]:
    return [claim.letter.id for claim in claims]


@contract("FLEET-68")
def test_letter_is_delivered_claimed_acknowledged_and_then_gone(harness: MailboxHarness) -> None:
    box, sent = harness.make(), letter("a")
    assert (box.pending_count(), harness.post.addresses()) == (0, [])
    delivered = box.deliver(sent)
    assert (box.pending_count(), box.find("a")) == (1, LetterState.DELIVERED)
    assert harness.post.addresses() == [ADDRESS]
    (claim,) = box.claim(10)
    assert claim == ClaimedLetter(sent, delivered.name)
    assert box.claim(10) == []
    assert (box.pending_count(), box.find("a")) == (1, LetterState.CLAIMED)
    assert (harness.post.addresses(), harness.post.addresses(claimed=True)) == ([], [ADDRESS])
    assert box.ack(claim)
    assert (box.recover(), box.pending_count(), box.find("a")) == ([], 0, None)


@contract("FLEET-69")
def test_fifty_concurrent_writers_lose_nothing_and_get_unique_names(
    harness: MailboxHarness,
) -> None:
    harness.make()
    names: list[str] = []
    start = threading.Barrier(50)

    def write(number: int) -> None:
        start.wait(WAIT_S)
        names.append(harness.post.open(ADDRESS).deliver(letter(f"l{number}")).name)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(50)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(WAIT_S)
    claims = harness.make().claim(100)
    assert sorted(ids(claims)) == sorted(f"l{number}" for number in range(50))
    assert [claim.name for claim in claims] == sorted(names)
    assert len({name[:20] for name in names}) == 50


@contract("FLEET-70")
def test_foreign_letters_arrive_in_order_of_creation(harness: MailboxHarness) -> None:
    box = harness.make()
    for n in (3, 1, 2):
        harness.plant(name_of(n, f"l{n}"), encode_letter(letter(f"l{n}", created_s=n)))
    assert ids(box.claim(2)) == ["l1", "l2"]
    assert ids(box.claim(2)) == ["l3"]


@contract("FLEET-P3")
def test_letters_arrive_in_order_of_acceptance_despite_wrong_clocks(
    harness: MailboxHarness,
) -> None:
    box, now_s = harness.make(), CLOCK.now_s()
    ten_years_s, last_s = 10 * 365 * 86400.0, 253402300799.0  # The last second of 9999.
    times = (now_s, now_s - 5, last_s, -1.0, now_s + ten_years_s, now_s + 1, 0.0)
    delivered = [box.deliver(letter(f"l{n}", created_s=at_s)) for n, at_s in enumerate(times)]
    names = [one.name for one in delivered]
    assert names[0] == f"{int(now_s) * 10**9:020d}-l0.json"
    assert names == sorted(names)
    # Wrong clocks have no lasting effect: names are at most a minute ahead.
    assert names[-1][:20] <= f"{(int(now_s) + 61) * 10**9:020d}"
    claims = box.claim(10)
    assert ids(claims) == [f"l{n}" for n in range(len(times))]
    assert [claim.name for claim in claims] == names


@contract("FLEET-71")
def test_unacknowledged_letters_are_recovered_on_reopen(
    harness: MailboxHarness,
) -> None:
    for n in range(4):
        harness.make().deliver(letter(f"l{n}"))
    claims = harness.make().claim(3)
    harness.make().ack(claims[1])
    assert harness.post.open(ADDRESS).recover() == [claims[0], claims[2]]
    assert ids(harness.make().claim(3)) == ["l3"]


def nested(levels: int) -> bytes:
    """A handoff with this many nested lists."""
    body = b"[" * levels + b"]" * levels
    return encode_letter(letter("x", kind="handoff")).replace(
        b'"what x says"', b'null, "a": ' + body
    )


GOOD = encode_letter(letter("x"))
BAD: dict[str, tuple[str, bytes]] = {
    "garbage": (name_of(1, "x"), b"\x00\xff{"),
    "empty": (name_of(1, "x"), b""),
    "half": (name_of(1, "x"), GOOD[:-9]),
    "too large": (name_of(1, "x"), GOOD + b" " * LETTER_BYTES_MAX),
    "nested too deeply": (name_of(1, "x"), b"[" * 100_000),
    "its body nested too deeply": (name_of(1, "x"), nested(BODY_LEVELS_MAX)),
    "not UTF-8": (name_of(1, "x"), GOOD.replace(b"says", b"\xff\xfe")),
    "another kind": (name_of(1, "x"), GOOD.replace(b'"task"', b'"fenced_run"')),
    "no assignment": (name_of(1, "x"), GOOD.replace(b'"assignment"', b'"question"')),
    "no time": (name_of(1, "x"), GOOD.replace(b'Z"', b'"')),
    "unsafe id": (name_of(1, "x"), GOOD.replace(b'"x"', b'"../x"')),
    "named after another": (name_of(1, "y"), GOOD),
    "not named like one": ("x.json", GOOD),
    "no order": ("1-x.json", GOOD),
}


@contract("FLEET-72")
@pytest.mark.parametrize("case", BAD)
def test_invalid_letter_is_moved_to_corrupt_and_others_arrive(
    harness: MailboxHarness, case: str
) -> None:
    box = harness.make()
    harness.plant(*BAD[case])
    harness.plant(name_of(0, "good"), encode_letter(letter("good")))
    harness.plant(".hidden.json", b"somebody is still writing it")
    harness.plant(name_of(2, "fine"), encode_letter(letter("fine")))
    assert ids(box.claim(3)) == ["good", "fine"]
    assert (box.pending_count(), ids(box.recover())) == (2, ["good", "fine"])
    if "named" not in case and "order" not in case:
        assert box.find("x") is LetterState.CORRUPT


def test_nested_body_is_read_without_indentation() -> None:
    deepest = parse_letter(nested(BODY_LEVELS_MAX - 1))
    assert len(text_of(deepest)) < 3 * BODY_LEVELS_MAX


@contract("FLEET-74")
def test_ack_removes_only_its_letter_even_with_a_shared_id(harness: MailboxHarness) -> None:
    box = harness.make()
    for n in (1, 2):
        harness.plant(name_of(n, "a"), encode_letter(letter("a", created_s=n)))
    harness.plant(name_of(3, "b-a"), encode_letter(letter("b-a")))
    first, second, other = box.claim(10)
    assert [box.ack(second), box.ack(second), box.put_back(second)] == [True, False, False]
    assert box.recover() == [first, other]
    # The id is compared as a whole: `b-a` ends like a letter named `a`.
    assert (box.find("a"), box.find("-a")) == (LetterState.CLAIMED, None)
    assert box.ack(first)
    assert (box.recover(), box.find("a")) == ([other], None)


@contract("FLEET-75")
def test_ask_is_a_query_by_default_and_needs_no_correlation_id() -> None:
    data = (
        b'{"id":"a","from":{"session_id":"s"},"kind":"ask","body":{"question":"why?"},'
        b'"created_at":"2026-01-01T00:00:00.123456789Z","unknown":1}'
    )
    found = parse_letter(data)
    assert found == Letter(
        id=LetterId("a"),
        from_=Sender("s"),
        kind="ask",
        body={"question": "why?"},
        created_at="2026-01-01T00:00:00.123456789Z",
    )
    assert (mode_of(found), text_of(found)) == ("query", "why?")
    steering = replace(found, body=body_of("ask", "why?", mode="steer"))
    assert mode_of(parse_letter(encode_letter(steering))) == "steer"
    assert b"correlation_id" not in encode_letter(found)


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        ("task", {"assignment": "do"}, "do"),
        ("reply", {"answer": ""}, ""),
        ("handoff", {"summary": "done so far"}, "done so far"),
        ("handoff", {"files": [1]}, '{"files":[1]}'),
    ],
)
def test_letter_round_trips_and_yields_the_text_for_the_agent(
    kind: LetterKind, body: dict[str, object], text: str
) -> None:
    whole = replace(
        letter("a"),
        kind=kind,
        body=body,
        correlation_id="q",
        expires_at="2027-01-15T08:00:01Z",
        from_=Sender("s", agent_id="agent-2"),
    )
    read = parse_letter(encode_letter(whole))
    assert (read, text_of(read)) == (whole, text)
    assert [is_expired(read, 1_800_000_000.0 + later_s) for later_s in (0, 1)] == [False, True]


def test_lone_surrogate_is_replaced_in_a_letter() -> None:
    sent = replace(letter("a"), body={"assignment": "caf\udcc3"})
    assert text_of(parse_letter(encode_letter(sent))) == "caf\ufffd"


@contract("FLEET-73")
def test_admitted_ids_keep_the_last_4096_across_encoding() -> None:
    seen = AdmittedLetters()
    assert [seen.add("a"), seen.add("a"), "a" in seen, "b" in seen] == [True, False, True, False]
    for n in range(ADMITTED_MAX):
        seen.add(f"l{n}")
    assert (ADMITTED_MAX, len(seen), "a" in seen, "l0" in seen) == (4096, 4096, False, True)
    again = parse_admitted(seen.encode())
    assert again.encode() == seen.encode()
    assert [again.add("l1"), again.add("new"), "l0" in again] == [False, True, False]


@contract("FLEET-76")
@pytest.mark.parametrize("crash_after", ["claim", "admit", "commit", "ack"])
def test_letter_is_admitted_once_whenever_a_crash_happens(
    harness: MailboxHarness, crash_after: str
) -> None:
    committed: tuple[list[str], bytes] = (
        [],
        AdmittedLetters().encode(),
    )  # Admitted letters and seen ids.

    def read(claims: list[ClaimedLetter], *, crash_after: str = "") -> None:
        nonlocal committed
        box, admitted, seen = (
            harness.post.open(ADDRESS),
            [*committed[0]],
            parse_admitted(committed[1]),
        )
        for claim in claims:
            if crash_after == "claim":
                return
            if seen.add(claim.letter.id):
                admitted.append(claim.letter.id)
            if crash_after == "admit":
                return
            committed = (admitted, seen.encode())
            if crash_after == "commit":
                return
            box.ack(claim)
            if crash_after == "ack":
                return

    for n in range(3):
        harness.make().deliver(letter(f"l{n}"))
    read(harness.post.open(ADDRESS).claim(10), crash_after=crash_after)
    read(harness.post.open(ADDRESS).recover())
    assert (committed[0], harness.make().pending_count()) == (["l0", "l1", "l2"], 0)


def test_put_back_letter_keeps_its_place_and_buried_letter_is_dead(
    harness: MailboxHarness,
) -> None:
    box = harness.make()
    for n in range(4):
        box.deliver(letter(f"l{n}"))
    first, second, third = box.claim(3)
    assert [box.put_back(second), box.put_back(second), box.bury(third)] == [True, False, True]
    assert [box.bury(third), box.ack(third), box.find("l2")] == [False, False, LetterState.DEAD]
    assert ids(box.claim(9)) == ["l1", "l3"]
    assert ids(box.recover()) == [first.letter.id, "l1", "l3"]


def test_same_letter_is_delivered_once_until_acknowledged(harness: MailboxHarness) -> None:
    box, sent = harness.make(), letter("a")
    first = box.deliver(sent)
    box.deliver(letter("b-a"))
    again = Delivered(first.letter_id, first.name, again=True)
    assert (box.deliver(sent), box.pending_count()) == (again, 2)
    with pytest.raises(LetterIdTaken):
        box.deliver(replace(sent, body={"assignment": "something else"}))
    (claim,) = box.claim(1)
    assert (box.deliver(sent), ids(box.claim(9))) == (again, ["b-a"])
    box.ack(claim)
    assert (box.deliver(sent).again, ids(box.claim(9))) == (False, ["a"])


@contract("FLEET-P2")
@pytest.mark.parametrize("bad_id", ["../x", "", ".x", "a/b", "a..b", "a\n", "ä", "x" * 201])
def test_unsafe_id_is_refused_before_any_change(harness: MailboxHarness, bad_id: str) -> None:
    for act in (harness.post.open, harness.post.make, harness.post.remove):
        with pytest.raises(UnsafeAddress):
            act(bad_id)
    box = harness.make()
    with pytest.raises(BadLetter):
        box.deliver(letter(bad_id))
    assert (box.find(bad_id), box.pending_count()) == (None, 0)


def test_letter_over_the_size_limit_is_refused_and_at_the_limit_arrives(
    harness: MailboxHarness,
) -> None:
    box = harness.make()
    room = LETTER_BYTES_MAX - len(encode_letter(replace(letter("a"), body={"assignment": "."}))) + 1
    box.deliver(replace(letter("a"), body={"assignment": "x" * room}))
    with pytest.raises(LetterTooLarge) as refused:
        box.deliver(replace(letter("b"), body={"assignment": "x" * (room + 1)}))
    assert (refused.value.letter_id, refused.value.hint != "") == ("b", True)
    assert ids(box.claim(9)) == ["a"]


def test_full_mailbox_refuses_letters_until_one_is_acknowledged(harness: MailboxHarness) -> None:
    box, data = harness.make(), encode_letter(letter("x"))
    for n in range(LETTERS_MAX - 2):
        harness.plant(name_of(n, "x"), data)
    claims = box.claim(5)
    for one in ("a", "b"):
        box.deliver(letter(one))
    with pytest.raises(MailboxFull) as refused:
        box.deliver(letter("c"))
    error: AppError = refused.value
    assert (error.code, error.retryable, error.status) == ("mailbox_full", True, 429)
    assert (refused.value.letter_id, refused.value.address) == ("c", ADDRESS)
    assert "letter c was not delivered" in error.message
    assert box.deliver(letter("a")).again  # It is there, so nothing is refused.
    box.ack(claims[0])
    box.deliver(letter("c"))
    assert (box.pending_count(), box.find("c")) == (LETTERS_MAX, LetterState.DELIVERED)


def test_corrupt_letters_are_limited_and_the_oldest_go_first(harness: MailboxHarness) -> None:
    box = harness.make()
    for n in range(KEPT_MAX + 2):
        harness.plant(name_of(n, f"l{n}"), b"?")
    assert box.claim(1) == []
    found = [box.find(f"l{n}") for n in (0, 1, 2, KEPT_MAX + 1)]
    assert found == [None, None, LetterState.CORRUPT, LetterState.CORRUPT]


def test_removed_mailbox_is_missing_and_can_be_made_again(harness: MailboxHarness) -> None:
    with pytest.raises(NoMailbox):
        harness.post.open(ADDRESS)
    box = harness.make()
    box.deliver(letter("a"))
    (claim,) = box.claim(1)
    assert [harness.post.remove(ADDRESS), harness.post.remove(ADDRESS)] == [True, False]
    for act in (
        box.pending_count,
        box.recover,
        lambda: box.deliver(letter("b")),
        lambda: box.ack(claim),
    ):
        with pytest.raises(NoMailbox):
            act()
    assert harness.post.addresses(claimed=True) == []
    assert harness.make().pending_count() == 0
    box.deliver(letter("c"))
    assert ids(box.claim(9)) == ["c"]


@pytest.mark.parametrize("seed", range(2))
def test_file_and_memory_mailboxes_behave_the_same(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    boxes = [files_harness(tmp_path / "m").make(), memory_harness().make()]
    claims: list[list[ClaimedLetter]] = [[], []]
    for _ in range(150):
        act, number, letter_id = chance.randrange(8), chance.randrange(4), f"l{chance.randrange(6)}"
        created_s = CLOCK.now_s() + chance.choice((0.0, -9.0, 3600.0))
        results: list[object] = []
        for box, claimed in zip(boxes, claims, strict=True):
            match act:
                case 0 | 1 if box.find(letter_id) in (None, LetterState.DEAD):
                    results.append(box.deliver(letter(letter_id, created_s=created_s)).again)
                case 2:
                    taken = box.claim(number)
                    claimed += taken
                    results.append(ids(taken))
                case 3 | 4 | 5 if number < len(claimed):
                    done = (box.ack, box.put_back, box.bury)[act - 3](claimed.pop(number))
                    results.append(done)
                case 6:
                    claimed[:] = box.recover()
                    results.append(ids(claimed))
                case _:
                    results.append([box.pending_count(), box.find(letter_id)])
        assert results == [results[0]] * len(results)
        assert len(results) in (0, 2)


def test_power_loss_undoes_claims_and_acks_but_no_delivery() -> None:
    post = MemoryPostOffice(CLOCK)
    box = post.make(ADDRESS)
    post.make("nobody-wrote-to-it")
    for n in range(2):
        box.deliver(letter(f"l{n}"))
    (claim,) = box.claim(1)
    box.ack(claim)
    post.lose_power()
    assert (box.find("l0"), ids(box.claim(9))) == (LetterState.DELIVERED, ["l0", "l1"])
    with pytest.raises(NoMailbox):
        post.open("nobody-wrote-to-it")
