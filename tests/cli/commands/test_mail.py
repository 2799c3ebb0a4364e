"""`culm mail` and `culm agents` with no server: letters go straight into mailboxes."""

import asyncio
import io
import json
import re
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from culm.cli.projects import KnownProject, ring
from culm.client.launch import ServerRequest
from culm.clock import LoopClock, format_time, parse_time
from culm.ids import LetterId
from culm.mail.base import ClaimedLetter
from culm.mail.letters import LETTERS_MAX, Letter, Sender, body_of, name_of, unanswered
from culm.mail.maildir import MaildirPostOffice
from culm.store.letters import add_letter, answer_letter, close_letter
from culm.wire.agents import LetterShown
from culm.wire.codec import Json
from culm.workspace.roots import project_folder, remember_workspace
from tests.cli.conftest import CliHarness, CommandResult
from tests.store.trees import TOP, open_tree
from tests.support import WAIT_S, contract

NO_SERVER_NOTE = "(no server is running; the letter is read when one starts)\n"
AGENT = "0b9c2a55-3a55-4b2e-8d2e-1f2a3b4c5d6e"


@pytest.fixture
def mailboxes(cli: CliHarness) -> Path:
    """Mailboxes of a project with a session and an agent, without a server."""
    cli.set_env(CULM_HOST=f"unix://{cli.project}/nobody.sock")
    folder = project_folder(cli.data_dir, cli.project)
    folder.mkdir(parents=True)
    with open_tree(folder / "culm.db") as tree:
        tree.add(AGENT)
    return folder / "mailboxes"


def claims_of(mailboxes: Path, address: str) -> list[ClaimedLetter]:
    return MaildirPostOffice(mailboxes, LoopClock()).open(address).claim(10)


def test_letter_is_delivered_without_a_server_and_has_a_status(
    cli: CliHarness, mailboxes: Path
) -> None:
    sent = cli.culm("mail", "send", "--to", AGENT, "look", "at this")
    letter_id = sent.out.strip()
    assert sent == CommandResult(0, f"{letter_id}\n", NO_SERVER_NOTE)
    assert cli.culm("mail", "status", letter_id) == CommandResult(0, "delivered\n")
    assert cli.culm("mail", "status", letter_id, "--to", AGENT) == CommandResult(0, "delivered\n")
    listed = json.loads(cli.culm("mail", "list", "--agent", AGENT, "--json").out)
    (shown,) = listed
    assert (shown["letter_id"], shown["from"], shown["to"]) == (letter_id, "person", AGENT)
    assert cli.culm("mail", "list", "--agent", TOP) == CommandResult(0, "", "no letters\n")
    ((letter, _),) = [(claim.letter, claim) for claim in claims_of(mailboxes, AGENT)]
    assert letter == Letter(
        id=LetterId(letter_id),
        from_=Sender(session_id="person"),
        kind="task",
        body={"assignment": "look at this"},
        created_at=letter.created_at,
    )
    # Claimed, but not yet recorded in the database.
    assert cli.culm("mail", "status", letter_id) == CommandResult(0, "delivered\n")


def test_recipient_is_found_by_name_or_id_prefix(cli: CliHarness, mailboxes: Path) -> None:
    for name in (AGENT[:4], f"the {AGENT}", f"The {AGENT}".upper()):
        assert cli.culm("mail", "send", "--to", name, "look", "at this").status == 0
    assert len(claims_of(mailboxes, AGENT)) == 3
    near = cli.culm("mail", "send", "--to", "the 0b9", "hi")
    assert near == CommandResult(
        2,
        "",
        "culm: no agent or session is named the 0b9\n"
        f"hint: did you mean agent {AGENT[:8]} (the {AGENT})\n",
    )


def test_read_and_unread_letters_are_listed_with_their_text(
    cli: CliHarness, mailboxes: Path
) -> None:
    letter_id = cli.culm("mail", "send", "--to", AGENT, "look\nat this").out.strip()
    with open_tree(mailboxes.parent / "culm.db") as tree:
        head = "[Letter l1 from person: a task]\nread this"
        tree.connection.execute("UPDATE runs SET prompt = ? WHERE id = ?", (head, f"r {TOP}"))
        read = LetterShown("l1", from_="person", to=TOP, created_at=int(LoopClock().now_s()))
        tree.do(add_letter(read, run_id=f"r {TOP}"))
    table = re.sub(r"\b0:\d\d\b", "AGE", cli.culm("mail", "list").out).splitlines()
    assert [line.split() for line in table] == [
        ["letter", "kind", "from", "to", "state", "age", "text"],
        [letter_id[:8], "task", "person", AGENT[:8], "delivered", "AGE", "look", "at", "this"],
        ["l1", "task", "person", TOP[:8], "delivered", "AGE", "read", "this"],
    ]
    assert len(cli.culm("mail", "list", "--agent", AGENT[:8]).out.splitlines()) == 2
    assert cli.culm("mail", "list", "--agent", "person").status == 0
    unknown = cli.culm("mail", "list", "--agent", "nope")
    assert (unknown.status, unknown.err.splitlines()[0]) == (
        2,
        "culm: no agent or session is named nope",
    )
    assert cli.culm("mail", "status", letter_id[:8]) == CommandResult(0, "delivered\n")


def test_handoff_is_read_from_stdin_with_sender_and_expiry(
    cli: CliHarness, mailboxes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("so far: ü\n\xff".encode())))
    args = ("--kind", "handoff", "--from", TOP, "--expires", "60")
    assert cli.culm("mail", "send", "--to", TOP, *args, "-").status == 0
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
    ("args", "status", "expected"),
    [
        (("--to", "../x", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", "/etc", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", "", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", "m$$c", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", "nobody", "hi"), 2, "no agent or session is named nobody"),
        (("--to", TOP, " "), 2, "the text is empty"),
        (("--to", TOP, "--from", "../x", "hi"), 2, "a mailbox's id has 1 to 200 letters"),
        (("--to", TOP, "x" * (300 << 10)), 1, " bytes; at most 262144 are delivered"),
        (("--to", TOP, "--dir", "/", "hi"), 2, "culm has never been used in /"),
        (("--to", TOP, "--host", "nonsense", "hi"), 2, "'nonsense' is not an address"),
    ],
)
def test_undeliverable_letter_is_refused_with_a_hint(
    cli: CliHarness, mailboxes: Path, args: tuple[str, ...], status: int, expected: str
) -> None:
    result = cli.culm("mail", "send", *args)
    assert (result.status, result.out) == (status, "")
    assert expected in result.err
    assert "\nhint: " in result.err
    assert not [*mailboxes.glob("*/*/*")]


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "1e300"])
def test_invalid_expiry_or_timeout_is_a_usage_error(
    cli: CliHarness, mailboxes: Path, number: str
) -> None:
    for command in (("send", "--expires", number), ("ask", "--timeout", number)):
        assert cli.culm("mail", *command, "--to", TOP, "hi").status == 2
    assert not mailboxes.exists()


def test_full_or_unsafe_mailbox_refuses_a_letter(cli: CliHarness, mailboxes: Path) -> None:
    box = MaildirPostOffice(mailboxes, LoopClock()).make(TOP)
    for number in range(LETTERS_MAX):
        (mailboxes / TOP / "new" / name_of(number, f"l{number}")).touch()
    full = cli.culm("mail", "send", "--to", TOP, "hi")
    assert (full.status, f"mailbox {TOP} is full with {LETTERS_MAX} letters" in full.err) == (
        1,
        True,
    )
    assert box.pending_count() == LETTERS_MAX
    (mailboxes / TOP).chmod(0o777)
    foreign = cli.culm("mail", "send", "--to", TOP, "hi")
    assert (foreign.status, f"mailbox {TOP} is not safe to use" in foreign.err) == (1, True)


def test_recorded_letter_has_a_status_and_unknown_id_is_refused(
    cli: CliHarness, mailboxes: Path
) -> None:
    with open_tree(mailboxes.parent / "culm.db") as tree:
        for name in ("l1", "l2", "l3"):
            shown = LetterShown(name, from_="person", to=TOP, created_at=1)
            tree.do(add_letter(shown, run_id=""))
        tree.do(answer_letter("l1", LetterId("l9")))
        tree.do(close_letter(LetterId("l2"), expired=True))
        tree.do(close_letter(LetterId("l3"), expired=False))
    states = [cli.culm("mail", "status", name).out for name in ("l1", "l2", "l3")]
    assert states == ["answered by l9\n", "expired\n", "dead\n"]
    table = cli.culm("mail", "list").out.splitlines()
    rows = [line.split() for line in table]
    assert rows[0] == ["letter", "kind", "from", "to", "state", "age", "text"]
    assert [[*row[:5], row[-1]] for row in rows[1:]] == [
        ["l3", "task", "person", TOP[:8], "dead", "-"],
        ["l2", "task", "person", TOP[:8], "expired", "-"],
        ["l1", "task", "person", TOP[:8], "answered", "-"],
    ]
    many = cli.culm("mail", "status", "l")
    assert (many.status, "which one: l3, l2, l1" in many.err) == (2, True)
    for letter_id in ("l4", "../l1", "\n"):
        assert cli.culm("mail", "status", letter_id).status != 0
    assert cli.culm("mail", "status", "l1", "--to", AGENT).status == 2


@asynccontextmanager
async def fake_server(folder: Path, answer: bytes) -> AsyncGenerator[ServerRequest]:
    """Serve one fixed answer to every connection."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1 << 16):
            writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(respond, folder / "s")
    try:
        yield ServerRequest(f"unix://{folder}/s")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull", ""),
        (
            b'HTTP/1.1 404 No\r\nContent-Length: 25\r\n\r\n{"message":"not known x"}',
            "the server at {} refused: not known x",
        ),
        (b"", "cannot notify the server at {}: "),
    ],
)
async def test_ring_reports_any_response_of_the_server(
    tmp_path: Path, answer: bytes, expected: str
) -> None:
    async with fake_server(tmp_path, answer) as server, asyncio.timeout(WAIT_S):
        ring_result = await ring(server, KnownProject(tmp_path, tmp_path), AGENT, {})
        assert ring_result.is_there
        assert ring_result.text.startswith(expected.format(server.url))
        assert bool(ring_result.text) == bool(expected)


@contextmanager
def replying(
    mailboxes: Path, address: str, *answers: str | dict[str, Json]
) -> Generator[list[Letter]]:
    """Answer letters in a thread; the received letters are in the list."""
    asked: list[Letter] = []
    over = threading.Event()

    def answer() -> None:
        post = MaildirPostOffice(mailboxes, LoopClock())
        while not over.wait(0.01):
            for claim in post.make(address).claim(1):
                asked.append(claim.letter)
                for number, text in enumerate(answers):
                    reply = Letter(
                        id=LetterId(f"reply-{number}"),
                        from_=Sender(session_id=address),
                        kind="reply",
                        body=body_of("reply", text) if isinstance(text, str) else text,
                        created_at=format_time(LoopClock().now_s()),
                        # Only the last one answers this letter.
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


def test_ask_prints_its_own_reply_and_leaves_no_mailbox(cli: CliHarness, mailboxes: Path) -> None:
    with replying(mailboxes, AGENT, "not this", "42\n") as asked:
        result = cli.culm("mail", "ask", "--to", AGENT, "how", "many?")
    assert result == CommandResult(0, "42\n", "(no server is running; waiting for one)\n")
    (question,) = asked
    assert (question.kind, question.body) == ("ask", {"question": "how many?"})
    assert question.expires_at is not None
    assert [path.name for path in mailboxes.iterdir()] == [AGENT]
    with replying(mailboxes, AGENT, "\x1b[2J") as asked:
        result = cli.culm("mail", "ask", "--json", "--to", AGENT, "how many?")
    shown = {"letter_id": asked[0].id, "reply_id": "reply-0", "from": AGENT}
    assert json.loads(result.out) == {**shown, "answer": "\x1b[2J", "failed": False}


def test_reply_without_an_answer_fails_the_ask(cli: CliHarness, mailboxes: Path) -> None:
    with replying(mailboxes, AGENT, unanswered("the run ended error.")) as asked:
        result = cli.culm("mail", "ask", "--to", AGENT, "how many?")
    assert result == CommandResult(
        1,
        "",
        "(no server is running; waiting for one)\n"
        "culm: It was not answered: the run ended error.\n"
        f"hint: `culm mail status {asked[0].id}` shows more\n",
    )


def test_unanswered_ask_ends_with_a_hint_and_leaves_no_mailbox(
    cli: CliHarness, mailboxes: Path
) -> None:
    result = cli.culm("mail", "ask", "--timeout", "0.05", "--to", AGENT, "anybody?")
    (claim,) = claims_of(mailboxes, AGENT)
    assert result == CommandResult(
        1,
        "",
        "(no server is running; waiting for one)\n"
        f"culm: no answer to letter {claim.letter.id} within 0.05 s\n"
        "hint: start a server with `culm serve` and ask again\n",
    )
    assert cli.culm("mail", "ask", "--to", "nobody", "anybody?").status == 2
    assert [path.name for path in mailboxes.iterdir()] == [AGENT]


def test_project_with_its_own_data_directory_is_found(cli: CliHarness, tmp_path: Path) -> None:
    cli.set_env(CULM_HOST=f"unix://{cli.project}/nobody.sock")
    root = tmp_path / "elsewhere"
    folder = project_folder(root, cli.project)
    folder.mkdir(parents=True)
    with open_tree(folder / "culm.db"):
        pass
    assert cli.culm("mail", "send", "--to", TOP, "hi").status == 2
    cli.data_dir.mkdir(parents=True)
    remember_workspace(cli.data_dir, path=cli.project, root=root, workspace_id="w")
    assert cli.culm("mail", "send", "--to", TOP, "hi").status == 0
    assert len(claims_of(folder / "mailboxes", TOP)) == 1


def test_unreadable_database_is_reported_and_nothing_is_delivered(
    cli: CliHarness, mailboxes: Path
) -> None:
    (mailboxes.parent / "culm.db").write_bytes(b"x" * 4096)
    result = cli.culm("mail", "send", "--to", TOP, "hi")
    assert (result.status, "file is not a database" in result.err) == (1, True)
    assert not mailboxes.exists()


def test_agents_are_listed_as_a_tree_below_their_sessions(cli: CliHarness, mailboxes: Path) -> None:
    with open_tree(mailboxes.parent / "culm.db") as tree:
        tree.add("child", AGENT)
        tree.use("child", 10, 0.5)
    rows = [line.split() for line in cli.culm("agents").out.splitlines()]
    assert rows == [
        ["agent", "role", "state", "cost", "name"],
        [TOP[:8], "session", "pending", "$0.5000"],
        [AGENT[:8], "worker", "pending", "$0.5000", "the", AGENT],
        ["child", "worker", "pending", "$0.5000", "the", "child"],
    ]
    listed = json.loads(cli.culm("agents", "--json").out)
    assert [(one["agent_id"], one["parent_id"]) for one in listed] == [
        (TOP, ""),
        (AGENT, TOP),
        ("child", AGENT),
    ]
