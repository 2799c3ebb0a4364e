"""`culm mail` and `culm agents` with no server: letters go straight into mailboxes."""

import asyncio
import io
import json
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from culm.cli import mail_command
from culm.cli.mail_place import KnownProject
from culm.cli.mail_ring import ring
from culm.client.launch import ServerRequest
from culm.clock import LoopClock
from culm.fleet.times import format_time, parse_time
from culm.ids import LetterId
from culm.mail.base import ClaimedLetter
from culm.mail.letters import Letter, Sender, body_of, unanswered
from culm.mail.maildir import MaildirPostOffice
from culm.mail.order import LETTERS_MAX, name_of
from culm.store.letters import add_letter, answer_letter, close_letter
from culm.wire import agents as wire
from culm.wire.agents import LetterShown
from culm.wire.codec import Json
from culm.workspace.roots import project_folder, remember_workspace
from tests.cli.conftest import Desk, Said
from tests.store.trees import TOP, open_tree
from tests.support import WAIT_S, contract

NOBODY = "(no server runs; it is read when one does)\n"
AGENT = "0b9c2a55-3a55-4b2e-8d2e-1f2a3b4c5d6e"


@pytest.fixture
def mailboxes(desk: Desk) -> Path:
    """Of a project with a session and an agent, where no server is."""
    desk.set_env(CULM_HOST=f"unix://{desk.project}/nobody.sock")
    folder = project_folder(desk.data_dir, desk.project)
    folder.mkdir(parents=True)
    with open_tree(folder / "culm.db") as tree:
        tree.add(AGENT)
    return folder / "mailboxes"


def claims_of(mailboxes: Path, address: str) -> list[ClaimedLetter]:
    return MaildirPostOffice(mailboxes, LoopClock()).open(address).claim(10)


def test_a_letter_is_delivered_without_a_server_and_can_be_asked_for(
    desk: Desk, mailboxes: Path
) -> None:
    sent = desk.culm("mail", "send", "--to", AGENT, "look", "at this")
    letter_id = sent.out.strip()
    assert sent == Said(0, f"{letter_id}\n", NOBODY)
    assert desk.culm("mail", "status", letter_id) == Said(0, "delivered\n")
    assert desk.culm("mail", "status", letter_id, "--to", AGENT) == Said(0, "delivered\n")
    listed = json.loads(desk.culm("mail", "list", "--agent", AGENT, "--json").out)
    (shown,) = listed
    assert (shown["letter_id"], shown["from"], shown["to"]) == (letter_id, "person", AGENT)
    assert desk.culm("mail", "list", "--agent", TOP) == Said(0, "", "there are no letters\n")
    ((letter, _),) = [(claim.letter, claim) for claim in claims_of(mailboxes, AGENT)]
    assert letter == Letter(
        id=LetterId(letter_id),
        from_=Sender(session_id="person"),
        kind="task",
        body={"assignment": "look at this"},
        created_at=letter.created_at,
    )
    # Claimed, and by a program that looks nowhere else.
    assert desk.culm("mail", "status", letter_id) == Said(0, "delivered\n")


def test_whom_a_letter_is_for_can_be_said_by_a_name_or_the_beginning_of_an_id(
    desk: Desk, mailboxes: Path
) -> None:
    for name in (AGENT[:4], f"the {AGENT}", f"The {AGENT}".upper()):
        assert desk.culm("mail", "send", "--to", name, "look", "at this").status == 0
    assert len(claims_of(mailboxes, AGENT)) == 3
    near = desk.culm("mail", "send", "--to", "the 0b9", "hi")
    assert near == Said(
        2,
        "",
        "culm: no agent or session is called the 0b9\n"
        f"hint: did you mean agent {AGENT[:8]} (the {AGENT})\n",
    )


def test_letters_are_listed_short_with_what_they_say_whether_they_were_read_or_not(
    desk: Desk, mailboxes: Path
) -> None:
    letter_id = desk.culm("mail", "send", "--to", AGENT, "look\nat this").out.strip()
    with open_tree(mailboxes.parent / "culm.db") as tree:
        head = "[Letter l1 from person: a task]\nread this"
        tree.connection.execute("UPDATE runs SET prompt = ? WHERE id = ?", (head, f"r {TOP}"))
        read = LetterShown("l1", from_="person", to=TOP, created_at=int(LoopClock().now_s()))
        tree.do(add_letter(read, run_id=f"r {TOP}"))
    table = desk.culm("mail", "list").out.splitlines()
    assert [line.split() for line in table] == [
        ["letter", "kind", "from", "to", "state", "age", "text"],
        [letter_id[:8], "task", "person", AGENT[:8], "delivered", "0:00", "look", "at", "this"],
        ["l1", "task", "person", TOP[:8], "delivered", "0:00", "read", "this"],
    ]
    assert len(desk.culm("mail", "list", "--agent", AGENT[:8]).out.splitlines()) == 2
    assert desk.culm("mail", "list", "--agent", "person").status == 0
    unknown = desk.culm("mail", "list", "--agent", "nope")
    assert (unknown.status, unknown.err.splitlines()[0]) == (
        2,
        "culm: no agent or session is called nope",
    )
    assert desk.culm("mail", "status", letter_id[:8]) == Said(0, "delivered\n")


def test_a_handoff_comes_from_stdin_with_its_sender_and_its_end(
    desk: Desk, mailboxes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("so far: ü\n\xff".encode())))
    args = ("--kind", "handoff", "--from", TOP, "--expires", "60")
    assert desk.culm("mail", "send", "--to", TOP, *args, "-").status == 0
    (claim,) = claims_of(mailboxes, TOP)
    letter = claim.letter
    assert (letter.kind, letter.body) == ("handoff", {"summary": "so far: ü\nÿ"})
    assert letter.from_ == Sender(session_id=TOP, agent_id=TOP)
    created_s, expires_s = (
        parse_time(text or "") for text in (letter.created_at, letter.expires_at)
    )
    assert created_s is not None
    assert expires_s == pytest.approx(created_s + 60)


@contract("FLEET-P2")
@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (("--to", "../x", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", "/etc", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", "", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", "m$$c", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", "nobody", "hi"), 2, "no agent or session is called nobody"),
        (("--to", TOP, " "), 2, "there is nothing to say"),
        (("--to", TOP, "--from", "../x", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", TOP, "x" * (300 << 10)), 1, " bytes; at most 262144 are delivered"),
        (("--to", TOP, "--dir", "/", "hi"), 2, "culm has never been used in /"),
        (("--to", TOP, "--host", "nonsense", "hi"), 2, "'nonsense' is not an address"),
    ],
)
def test_what_cannot_be_delivered_is_refused_with_a_hint_and_leaves_nothing(
    desk: Desk, mailboxes: Path, args: tuple[str, ...], status: int, words: str
) -> None:
    said = desk.culm("mail", "send", *args)
    assert (said.status, said.out) == (status, "")
    assert words in said.err
    assert "\nhint: " in said.err
    assert not [*mailboxes.glob("*/*/*")]


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "1e300"])
def test_a_time_that_is_none_is_wrong_usage(desk: Desk, mailboxes: Path, number: str) -> None:
    for command in (("send", "--expires", number), ("ask", "--timeout", number)):
        assert desk.culm("mail", *command, "--to", TOP, "hi").status == 2
    assert not mailboxes.exists()


def test_a_mailbox_that_is_full_or_not_ours_alone_takes_no_letter(
    desk: Desk, mailboxes: Path
) -> None:
    box = MaildirPostOffice(mailboxes, LoopClock()).make(TOP)
    for number in range(LETTERS_MAX):
        (mailboxes / TOP / "new" / name_of(number, f"l{number}")).touch()
    full = desk.culm("mail", "send", "--to", TOP, "hi")
    assert (full.status, f"mailbox {TOP} is full with {LETTERS_MAX} letters" in full.err) == (
        1,
        True,
    )
    assert box.pending_count() == LETTERS_MAX
    (mailboxes / TOP).chmod(0o777)
    foreign = desk.culm("mail", "send", "--to", TOP, "hi")
    assert (foreign.status, f"mailbox {TOP} is not safe to use" in foreign.err) == (1, True)


def test_what_the_server_has_noted_of_a_letter_is_told_and_what_nobody_knows_is_not_found(
    desk: Desk, mailboxes: Path
) -> None:
    with open_tree(mailboxes.parent / "culm.db") as tree:
        for name in ("l1", "l2", "l3"):
            shown = LetterShown(name, from_="person", to=TOP, created_at=1)
            tree.do(add_letter(shown, run_id=""))
        tree.do(answer_letter("l1", LetterId("l9")))
        tree.do(close_letter(LetterId("l2"), expired=True))
        tree.do(close_letter(LetterId("l3"), expired=False))
    said = [desk.culm("mail", "status", name).out for name in ("l1", "l2", "l3")]
    assert said == ["answered by l9\n", "expired\n", "dead\n"]
    table = desk.culm("mail", "list").out.splitlines()
    rows = [line.split() for line in table]
    assert rows[0] == ["letter", "kind", "from", "to", "state", "age", "text"]
    assert [[*row[:5], row[-1]] for row in rows[1:]] == [
        ["l3", "task", "person", TOP[:8], "dead", "-"],
        ["l2", "task", "person", TOP[:8], "expired", "-"],
        ["l1", "task", "person", TOP[:8], "answered", "-"],
    ]
    many = desk.culm("mail", "status", "l")
    assert (many.status, "which one: l3, l2, l1" in many.err) == (2, True)
    for letter_id in ("l4", "../l1", "\n"):
        assert desk.culm("mail", "status", letter_id).status != 0
    assert desk.culm("mail", "status", "l1", "--to", AGENT).status == 2


@asynccontextmanager
async def somebody(folder: Path, answer: bytes) -> AsyncGenerator[ServerRequest]:
    """A server that says one thing to whoever comes."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1 << 16):
            writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(say, folder / "s")
    try:
        yield ServerRequest(f"unix://{folder}/s")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull", ""),
        (
            b'HTTP/1.1 404 No\r\nContent-Length: 25\r\n\r\n{"message":"not known x"}',
            "the server at {} says: not known x",
        ),
        (b"", "cannot ring the server at {}: "),
    ],
)
async def test_a_server_that_is_rung_may_say_what_it_likes(
    tmp_path: Path, answer: bytes, words: str
) -> None:
    async with somebody(tmp_path, answer) as server, asyncio.timeout(WAIT_S):
        rung = await ring(server, KnownProject(tmp_path, tmp_path), AGENT, {})
        assert rung.is_there
        assert rung.text.startswith(words.format(server.url))
        assert bool(rung.text) == bool(words)


@contextmanager
def replying(
    mailboxes: Path, address: str, *answers: str | dict[str, Json]
) -> Generator[list[Letter]]:
    """Somebody who answers one question in a thread; what was asked is in the list."""
    asked: list[Letter] = []
    over = threading.Event()

    def answer() -> None:
        post = MaildirPostOffice(mailboxes, LoopClock())
        while not over.wait(0.01):
            for claim in post.make(address).claim(1):
                asked.append(claim.letter)
                for number, said in enumerate(answers):
                    reply = Letter(
                        id=LetterId(f"reply-{number}"),
                        from_=Sender(session_id=address),
                        kind="reply",
                        body=body_of("reply", said) if isinstance(said, str) else said,
                        created_at=format_time(LoopClock().now_s()),
                        # Only the last one is an answer to it.
                        correlation_id=claim.letter.id if number == len(answers) - 1 else "other",
                    )
                    post.open(claim.letter.from_.agent_id or "").deliver(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        thread.join(WAIT_S)


def test_a_question_waits_for_its_own_reply_prints_it_and_leaves_no_mailbox(
    desk: Desk, mailboxes: Path
) -> None:
    with replying(mailboxes, AGENT, "not this", "42\n") as asked:
        said = desk.culm("mail", "ask", "--to", AGENT, "how", "many?")
    assert said == Said(0, "42\n", "(no server runs; waiting for one that answers)\n")
    (question,) = asked
    assert (question.kind, question.body) == ("ask", {"question": "how many?"})
    assert question.expires_at is not None
    assert [path.name for path in mailboxes.iterdir()] == [AGENT]
    with replying(mailboxes, AGENT, "\x1b[2J") as asked:
        said = desk.culm("mail", "ask", "--json", "--to", AGENT, "how many?")
    shown = {"letter_id": asked[0].id, "reply_id": "reply-0", "from": AGENT}
    assert json.loads(said.out) == {**shown, "answer": "\x1b[2J", "failed": False}


def test_a_reply_that_is_no_answer_is_not_taken_for_one(desk: Desk, mailboxes: Path) -> None:
    with replying(mailboxes, AGENT, unanswered("the run ended error.")) as asked:
        said = desk.culm("mail", "ask", "--to", AGENT, "how many?")
    assert said == Said(
        1,
        "",
        "(no server runs; waiting for one that answers)\n"
        "culm: It was not answered: the run ended error.\n"
        f"hint: `culm mail status {asked[0].id}` says more\n",
    )


def test_a_question_that_nobody_answers_ends_with_a_hint_and_leaves_no_mailbox(
    desk: Desk, mailboxes: Path
) -> None:
    said = desk.culm("mail", "ask", "--timeout", "0.05", "--to", AGENT, "anybody?")
    (claim,) = claims_of(mailboxes, AGENT)
    assert said == Said(
        1,
        "",
        "(no server runs; waiting for one that answers)\n"
        f"culm: no answer to letter {claim.letter.id} within 0.05 s\n"
        "hint: start a server, such as with culm serve, and ask again\n",
    )
    assert desk.culm("mail", "ask", "--to", "nobody", "anybody?").status == 2
    assert [path.name for path in mailboxes.iterdir()] == [AGENT]


def test_a_project_with_a_data_directory_of_its_own_is_found_by_the_list_of_workspaces(
    desk: Desk, tmp_path: Path
) -> None:
    desk.set_env(CULM_HOST=f"unix://{desk.project}/nobody.sock")
    root = tmp_path / "elsewhere"
    folder = project_folder(root, desk.project)
    folder.mkdir(parents=True)
    with open_tree(folder / "culm.db"):
        pass
    assert desk.culm("mail", "send", "--to", TOP, "hi").status == 2
    desk.data_dir.mkdir(parents=True)
    remember_workspace(desk.data_dir, path=desk.project, root=root, workspace_id="w")
    assert desk.culm("mail", "send", "--to", TOP, "hi").status == 0
    assert len(claims_of(folder / "mailboxes", TOP)) == 1


def test_a_database_that_cannot_be_read_is_told_and_nothing_is_delivered(
    desk: Desk, mailboxes: Path
) -> None:
    (mailboxes.parent / "culm.db").write_bytes(b"x" * 4096)
    said = desk.culm("mail", "send", "--to", TOP, "hi")
    assert (said.status, "file is not a database" in said.err) == (1, True)
    assert not mailboxes.exists()


def test_agents_are_listed_as_a_tree_below_the_sessions_that_began_them(
    desk: Desk, mailboxes: Path
) -> None:
    with open_tree(mailboxes.parent / "culm.db") as tree:
        tree.add("child", AGENT)
        tree.use("child", 10, 0.5)
    rows = [line.split() for line in desk.culm("agents").out.splitlines()]
    assert rows == [
        ["agent", "role", "state", "cost", "name"],
        [TOP[:8], "session", "pending", "$0.5000"],
        [AGENT[:8], "worker", "pending", "$0.5000", "the", AGENT],
        ["child", "worker", "pending", "$0.5000", "the", "child"],
    ]
    listed = json.loads(desk.culm("agents", "--json").out)
    assert [(one["agent_id"], one["parent_id"]) for one in listed] == [
        (TOP, ""),
        (AGENT, TOP),
        ("child", AGENT),
    ]


def test_the_longest_time_a_letter_may_have_is_that_of_the_wire() -> None:
    assert mail_command.EXPIRES_S_MAX == wire.EXPIRES_S_MAX
