"""Work with what runs and with people: logs, servers, downloads, answers, hooks, own tools."""

import asyncio
import json
import re
import struct
import sys
import zlib
from pathlib import Path

from culm.testing.script import Reply, Rule
from culm.wire.agent import ShellCommand, ShellOutput
from culm.wire.asks import QuestionAnswer, QuestionRequest, QuestionResponse, Resolved
from culm.wire.messages import ToolResult
from tests.quality.task import bash, open_task, use
from tests.support import WAIT_S, contract

LICENSES = ["MIT", "Apache-2.0"]


async def test_a_long_log_is_searched_in_the_file_that_keeps_it(tmp_path: Path) -> None:
    count, at = 20_000, 12_345
    build = f"""\
for n in range(1, {count + 1}):
    print(n, "ERROR: the disk is full" if n == {at} else "all is well")
raise SystemExit(7)
"""
    tree = {"build.py": build.encode()}
    async with open_task(tmp_path, tree) as task:
        (said,) = await task.does(bash("python3 -B build.py"))
        assert said.startswith("1 all is well\n2 all is well\n")
        assert said.endswith(f"{count} all is well\nExit code 7")
        assert "ERROR" not in said
        kept = re.search(r"all of the output is in (\S+) …\]", said)
        assert kept is not None
        path = kept[1]
        found, around, counted = await task.does(
            use("grep", pattern="ERROR|FATAL", path=path),
            use("view", file_path=path, offset=at - 2, limit=3),
            bash(f"grep -c well {path}; tail -n 1 {path}"),
            approve="deny",  # What the agent put there it may read.
        )
        assert found.splitlines()[1:] == [f" {at}|{at} ERROR: the disk is full"]
        assert around.splitlines()[:3] == [
            f" {at - 1}|{at - 1} all is well",
            f" {at}|{at} ERROR: the disk is full",
            f" {at + 1}|{at + 1} all is well",
        ]
        assert counted == f"{count - 1}\n{count} all is well"
        assert Path(path).read_text().count("\n") == count
        assert task.tree() == tree
        assert await task.versions() == {}


def png(width: int, height: int) -> bytes:
    """A black picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = (b"\0" + b"\0" * width) * height
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


async def test_a_server_is_started_probed_read_from_and_stopped(tmp_path: Path) -> None:
    page = b"<html><body><h1>It works</h1><p>A <b>page</b>.</p></body></html>"
    picture = png(3, 2)
    tree = {"site/index.html": page, "site/logo.png": picture}
    async with open_task(tmp_path, tree) as task:
        command = "python3 -B -u -m http.server 0 --bind 127.0.0.1"
        (started,) = await task.does(bash(command, working_dir="site", run_in_background=True))
        assert "It goes on in the background as job-1;" in started
        (running,) = await task.processes()
        assert (running.kind, running.command) == ("job", command)
        async with asyncio.timeout(WAIT_S):
            while (port := re.search(r"port (\d+)", started)) is None:
                (started,) = await task.does(use("job_output", shell_id="job-1"))
        url = f"http://127.0.0.1:{port[1]}"

        run_id = await task.start(use("fetch", url=f"{url}/"), approve="ask")
        asked = await task.request_in()
        assert asked.tool_name == "fetch"
        assert "127.0.0.1" in asked.description
        await task.answer(asked.id, "allow_session")
        (fetched,) = await task.finish(run_id)
        assert (fetched.content, fetched.is_error) == ("# It works\n\nA **page**.", False)
        assert await task.does(use("fetch", url=f"{url}/index.html", format="text"), approve="ask")
        assert len(task.requests()) == 1

        run_id = await task.start(
            use("download", url=f"{url}/logo.png", file_path="assets/logo.png"),
            use("view", file_path="assets/logo.png"),
            use("job_output", shell_id="job-1"),
            use("job_kill", shell_id="job-1"),
            use("fetch", url=f"{url}/"),
            use("job_output", shell_id="job-1"),
            approve="allow",
        )
        kept, seen, heard, killed, gone, after = await task.finish(run_id)
        assert kept.content == f"assets/logo.png is there: {len(picture)} bytes, image/png."
        assert (seen.mime_type, seen.is_error) == ("image/png", False)
        assert '"GET /index.html HTTP/1.1" 200' in heard.content
        assert heard.content.endswith("Still running")
        assert killed.content == "job-1 was ended, and everything it had started."
        assert gone.is_error
        assert after.content.startswith("(no output since you last looked)\nEnded by signal")
        assert await task.processes() == []
        assert task.tree() == {**tree, "assets/logo.png": picture}
        assert await task.known() == ["assets/logo.png"]


async def test_a_job_ends_with_its_session_and_a_typed_command_with_whoever_typed_it(
    tmp_path: Path,
) -> None:
    async with open_task(tmp_path, {}) as task:
        await task.does(bash("sleep 100", run_in_background=True))
        path = task.remote.path(f"/agent/sessions/{task.session_id}/shell")
        typed = ShellCommand("setsid sleep 100 & sleep 100")
        async with asyncio.TaskGroup() as tasks:
            typing = tasks.create_task(task.other.ask("POST", path, ShellOutput, typed))
            running = await task.until_running(2)
            assert sorted(process.kind for process in running) == ["job", "shell"]
            typing.cancel()  # As if its window was closed.
        (left,) = await task.until_running(1)
        assert left.kind == "job"
        await task.remote.delete_session(task.session_id)
        assert await task.until_running(0) == []


@contract("EXC-7")
async def test_an_answer_of_a_person_decides_how_the_work_goes_on(tmp_path: Path) -> None:
    choices = [{"label": label} for label in LICENSES]
    asking = use("question", questions=[
        {"question": "Which licence?", "description": "For the whole.", "type": "single_choice",
         "choices": choices},
        {"question": "Whose?", "description": "The holder.", "type": "free_text"},
    ])  # fmt: skip
    # A model that reads the answer: what it writes next depends on it.
    rules = [
        Rule(f"Which licence?\n- {label}\n\nWhose?\nAnna", Reply(calls=[
            use("write", file_path="LICENSE", content=f"{label}, Anna\n")
        ]), times=1)
        for label in LICENSES
    ]  # fmt: skip
    async with open_task(tmp_path, {}, rules) as task:
        run_id = await task.start(asking, approve=[{"tool": "write", "decision": "allow"}])
        shown = await task.heard.until(lambda told: told.type == "question_batch_request")
        batch = shown.read(QuestionRequest)
        which, whose = batch.questions
        responses = [
            QuestionResponse(which.id, [which.choices[1].id]),
            QuestionResponse(whose.id, fill_in_text="Anna"),
        ]
        body = QuestionAnswer(batch.id, responses)
        path = task.remote.path("/questions/answer")
        resolved = [await task.other.ask("POST", path, Resolved, body) for _ in range(2)]
        assert [one.resolved for one in resolved] == [True, False]
        answered, _ = await task.finish(run_id)
        assert answered.content == "Which licence?\n- Apache-2.0\n\nWhose?\nAnna"
        assert task.tree() == {"LICENSE": b"Apache-2.0, Anna\n"}
        assert await task.versions() == {"LICENSE": ["", "Apache-2.0, Anna\n"]}


# Lets nothing be pushed: what it finds instead is said aloud.
GUARD = """\
import json, sys
call = json.load(sys.stdin)
command = call["tool_input"]["command"]
if "push" in command:
    print(json.dumps({"updated_input": {"command": command.replace("push", "push --dry-run")},
                      "context": "Nothing is pushed from here."}))
"""
WORDS = """\
import json, pathlib, sys
told = json.load(sys.stdin)
count = len(pathlib.Path(told["cwd"], told["arguments"]["path"]).read_text().split())
print(json.dumps({"content": f"{count} words", "metadata": {"words": count}}))
"""


async def test_a_hook_rewrites_a_call_and_a_tool_of_the_user_is_used_like_any_other(
    tmp_path: Path,
) -> None:
    tree = {
        "notes.txt": b"one two  three\n",
        "guard.py": GUARD.encode(),
        "words.py": WORDS.encode(),
    }
    python = f"{sys.executable} -B"
    guard = {"matcher": "^bash$", "command": f"{python} guard.py", "name": "guard"}
    count_words = {
        "command": f"{python} words.py",
        "description": "Count the words of a file.",
        "parameters": {"properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    async with open_task(
        tmp_path, tree, hooks={"PreToolUse": [guard]}, own_tools={"count_words": count_words}
    ) as task:
        run_id = await task.start(
            bash("echo git push origin | tee done.txt"),
            use("count_words", path="notes.txt"),
            use("count_words", file="notes.txt"),
            approve="allow",
        )
        pushed, counted, wrong = await task.finish(run_id)
        assert pushed.content == "git push --dry-run origin\nNothing is pushed from here."
        assert metadata_of(pushed)["hook"] == {
            "hook_count": 1, "decision": "none", "input_rewrite": True,
            "hooks": [{"name": "guard", "matcher": "^bash$", "decision": "none",
                       "input_rewrite": True}],
        }  # fmt: skip
        assert (counted.content, metadata_of(counted)) == ("3 words", {"words": 3})
        assert (wrong.content, wrong.is_error) == ("count_words: path is missing", True)
        assert task.tree() == {**tree, "done.txt": b"git push --dry-run origin\n"}
        assert await task.versions() == {}


def metadata_of(result: ToolResult) -> dict[str, object]:
    return json.loads(result.metadata)
