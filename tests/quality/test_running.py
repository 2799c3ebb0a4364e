"""Complete tasks with processes and people: logs, servers, answers, hooks, own tools."""

import asyncio
import json
import re
import struct
import sys
import zlib
from pathlib import Path

from culm.testing.script import Reply, ReplyRule
from culm.wire.asks import QuestionAnswer, QuestionRequest, QuestionResponse, Resolved
from culm.wire.messages import ToolResult
from culm.wire.runs import ShellOutput, ShellRequest
from tests.quality.task import bash, open_task, use
from tests.support import WAIT_S, contract

LICENSES = ["MIT", "Apache-2.0"]


async def test_a_long_log_is_searched_in_its_output_file(tmp_path: Path) -> None:
    count, at = 20_000, 12_345
    build = f"""\
for n in range(1, {count + 1}):
    print(n, "ERROR: the disk is full" if n == {at} else "all is well")
raise SystemExit(7)
"""
    tree = {"build.py": build.encode()}
    async with open_task(tmp_path, tree) as task:
        (output,) = await task.run_calls(bash("python3 -B build.py"))
        assert output.startswith("1 all is well\n2 all is well\n")
        assert output.endswith(f"{count} all is well\nExit code 7")
        assert "ERROR" not in output
        saved = re.search(r"all of the output is in (\S+) …\]", output)
        assert saved is not None
        path = saved[1]
        found, around, counted = await task.run_calls(
            use("grep", pattern="ERROR|FATAL", path=path),
            use("view", file_path=path, offset=at - 2, limit=3),
            bash(f"grep -c well {path}; tail -n 1 {path}"),
            approve="deny",  # The agent may read its own output file.
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
    """Return a black PNG image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = (b"\0" + b"\0" * width) * height
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


async def test_a_server_is_started_fetched_from_and_stopped(tmp_path: Path) -> None:
    page = b"<html><body><h1>It works</h1><p>A <b>page</b>.</p></body></html>"
    picture = png(3, 2)
    tree = {"site/index.html": page, "site/logo.png": picture}
    async with open_task(tmp_path, tree) as task:
        command = "python3 -B -u -m http.server 0 --bind 127.0.0.1"
        (started,) = await task.run_calls(bash(command, working_dir="site", run_in_background=True))
        assert "It goes on in the background as job-1;" in started
        (running,) = await task.processes()
        assert (running.kind, running.command) == ("job", command)
        async with asyncio.timeout(WAIT_S):
            while (port := re.search(r"port (\d+)", started)) is None:
                (started,) = await task.run_calls(use("job_output", shell_id="job-1"))
        url = f"http://127.0.0.1:{port[1]}"

        run_id = await task.start(use("fetch", url=f"{url}/"), approve="ask")
        asked = await task.wait_for_request()
        assert asked.tool_name == "fetch"
        assert "127.0.0.1" in asked.description
        await task.answer(asked.id, "allow_session")
        (fetched,) = await task.finish(run_id)
        assert (fetched.content, fetched.is_error) == ("# It works\n\nA **page**.", False)
        assert await task.run_calls(
            use("fetch", url=f"{url}/index.html", format="text"), approve="ask"
        )
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
        saved, seen, output, killed, gone, after = await task.finish(run_id)
        assert saved.content == f"assets/logo.png was saved: {len(picture)} bytes, image/png."
        assert (seen.mime_type, seen.is_error) == ("image/png", False)
        assert '"GET /index.html HTTP/1.1" 200' in output.content
        assert output.content.endswith("Still running")
        assert killed.content == "job-1 was ended, and everything it had started."
        assert gone.is_error
        assert after.content.startswith("(no output since you last looked)\nEnded by signal")
        assert await task.processes() == []
        assert task.tree() == {**tree, "assets/logo.png": picture}
        assert await task.known() == ["assets/logo.png"]


async def test_a_job_ends_with_its_session_and_a_user_command_with_its_client(
    tmp_path: Path,
) -> None:
    async with open_task(tmp_path, {}) as task:
        await task.run_calls(bash("sleep 100", run_in_background=True))
        path = task.remote.path(f"/agent/sessions/{task.session_id}/shell")
        typed = ShellRequest("setsid sleep 100 & sleep 100")
        async with asyncio.TaskGroup() as tasks:
            typing = tasks.create_task(task.other.ask("POST", path, ShellOutput, typed))
            running = await task.until_running(2)
            assert sorted(process.kind for process in running) == ["job", "shell"]
            typing.cancel()  # As if the user's terminal were closed.
        (left,) = await task.until_running(1)
        assert left.kind == "job"
        await task.remote.delete_session(task.session_id)
        assert await task.until_running(0) == []


@contract("EXC-7")
async def test_the_answer_to_a_question_decides_the_next_call(tmp_path: Path) -> None:
    choices = [{"label": label} for label in LICENSES]
    asking = use("question", questions=[
        {"question": "Which licence?", "description": "For the whole.", "type": "single_choice",
         "choices": choices},
        {"question": "Whose?", "description": "The holder.", "type": "free_text"},
    ])  # fmt: skip
    # The model's next call depends on the answer.
    rules = [
        ReplyRule(f"Which licence?\n- {label}\n\nWhose?\nAnna", Reply(calls=[
            use("write", file_path="LICENSE", content=f"{label}, Anna\n")
        ]), times=1)
        for label in LICENSES
    ]  # fmt: skip
    async with open_task(tmp_path, {}, rules) as task:
        run_id = await task.start(asking, approve=[{"tool": "write", "decision": "allow"}])
        shown = await task.events.until(lambda event: event.type == "question_batch_request")
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


# A hook that turns every push into a dry run and says so.
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
request = json.load(sys.stdin)
count = len(pathlib.Path(request["cwd"], request["arguments"]["path"]).read_text().split())
print(json.dumps({"content": f"{count} words", "metadata": {"words": count}}))
"""


async def test_a_hook_rewrites_a_call_and_a_configured_tool_is_used(
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
