"""Every command ends with the exit status that is recorded for its situation."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import uvloop

from tests.frozen.commands import run_culm
from tests.frozen.comparing import HERE
from tests.frozen.data import directories as data
from tests.frozen.storage import Json, parse_json
from tests.support import WAIT_S

VERSION = "0.1.0"
EXITS = parse_json((HERE / "exits.json").read_text())
WAITS = "Wait for permission."  # The prompt of a recorded run that waits for a person.


def situations(group: str) -> list[tuple[int, list[str]]]:
    rows = EXITS[group]
    assert isinstance(rows, list)
    found: list[tuple[int, list[str]]] = []
    for row in rows:
        assert isinstance(row, dict)
        code, args = row["code"], row["args"]
        assert isinstance(code, int)
        assert isinstance(args, list)
        found.append((code, [str(arg) for arg in args]))
    return found


def recorded_runs() -> list[dict[str, Json]]:
    answers = data.expected_of(VERSION)["answers"]
    assert isinstance(answers, dict)
    runs = answers["runs"]
    assert isinstance(runs, list)
    return [run for run in runs if isinstance(run, dict)]


def own_environment(folder: Path) -> Mapping[str, str]:
    """Return default paths inside `folder`, where no server runs."""
    names = ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME")
    return {name: str(folder / name) for name in names}


@contextmanager
def served(folder: Path) -> Generator[str]:
    """Run a server on the recorded directory in a thread; yields its address."""
    at_s = data.expected_of(VERSION)["recorded_at"]
    assert isinstance(at_s, int | float)
    data.restore(VERSION, folder, at_s)
    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with data.open_recorded(folder, at_s) as flow:
            over = asyncio.Event()
            ready.set_result((flow.url, asyncio.get_running_loop(), over))
            await over.wait()

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as exc:
            if not ready.done():
                ready.set_exception(exc)
            raise

    thread = threading.Thread(target=work, name="recorded server")
    thread.start()
    try:
        url, loop, over = ready.result(WAIT_S)
        try:
            yield url
        finally:
            loop.call_soon_threadsafe(over.set)
    finally:
        thread.join(WAIT_S)
    assert not thread.is_alive()


def test_exit_codes_without_a_server_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "culm.json").write_text('{"permissions": {"allowed_tools": ["view"]}}')
    env = own_environment(tmp_path)
    for code, args in situations("without a server"):
        ended = run_culm(args, env, str(tmp_path))
        assert ended.status == code, (args, ended)


def test_exit_codes_with_a_server_are_unchanged(tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    with served(folder) as url:
        env = {**own_environment(folder), "CULM_HOST": url}
        for code, args in situations("with a server"):
            ended = run_culm(args, env, str(folder / "project"))
            assert ended.status == code, (args, ended)


def test_exit_code_of_every_outcome_is_unchanged(tmp_path: Path) -> None:
    folder, found = tmp_path.resolve(), dict[str, Json]()
    with served(folder) as url:
        env = {**own_environment(folder), "CULM_HOST": url}
        for run in recorded_runs():
            outcome, run_id = str(run["outcome"]), str(run["id"])
            if run["state"] == "ended" and run["kind"] == "prompt" and outcome not in found:
                ended = run_culm(["attach", run_id], env, str(folder / "project"))
                found[outcome] = ended.status
    assert found == EXITS["outcomes"]


def test_interrupted_command_ends_with_130(tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    (run_id,) = [str(run["id"]) for run in recorded_runs() if run["prompt"] == WAITS]
    with served(folder) as url:
        env = {**own_environment(folder), "CULM_HOST": url}
        ended = run_culm(["attach", run_id], env, str(folder / "project"), interrupt_at=WAITS)
    assert ended.status == 130, ended


def test_command_whose_stdout_is_closed_ends_with_141(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -m culm run hello >&-', sys.executable],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **own_environment(tmp_path)},
        check=False,
        timeout=30,
    )
    assert ended.returncode == 141


def test_every_recorded_code_has_a_situation() -> None:
    codes, outcomes = EXITS["codes"], EXITS["outcomes"]
    assert isinstance(codes, dict)
    assert isinstance(outcomes, dict)
    groups = ("without a server", "with a server")
    shown = {code for group in groups for code, _ in situations(group)}
    # The last one needs a separate process: tests/live checks it with `culm serve`.
    known = (*shown, *outcomes.values(), 130, 141, "128 + n")
    assert codes.keys() == {str(code) for code in known}
