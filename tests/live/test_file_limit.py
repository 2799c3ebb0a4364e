"""The limit on open files: a server with few, and the limit that its commands get."""

from pathlib import Path

import pytest

from culm.client.run import open_asked
from culm.file_limit import FILES_MIN
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ScriptedCall
from tests.flow.reading import results_of
from tests.live.harness import make_directory, run_process
from tests.live.run_harness import open_agent, script

COUNT = Reply(calls=[ScriptedCall(name="bash", input={"command": "ulimit -Sn; cat ready"})])


def serve_with(soft: int, hard: int) -> tuple[str, ...]:
    """`culm serve` in a process with these limits."""
    program = (
        "import resource, runpy, sys; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
        "sys.argv = ['culm', 'serve', *sys.argv[1:]]; "
        "runpy.run_module('culm', run_name='__main__')"
    )
    return "-c", program


@pytest.mark.parametrize(("soft", "hard"), [(FILES_MIN, FILES_MIN), (600, 2048)])
async def test_commands_run_with_the_users_own_limit(folder: Path, soft: int, hard: int) -> None:
    directory = make_directory(folder)
    (directory / "ready").write_text("ready\n")
    async with (
        open_model_server(script(COUNT, Reply(text="Done."))) as model,
        open_agent(folder, model, program=serve_with(soft, hard)) as (_, client),
    ):
        remote = await client.open_workspace(directory)
        async with open_asked(remote, "go", approve="allow") as asked:
            assert (await asked.answer()).is_complete
        (result,) = results_of(await remote.messages(asked.session_id))
        assert result.content.startswith(f"{soft}\nready")


async def test_server_that_can_open_too_few_files_gives_the_reason(folder: Path) -> None:
    few = FILES_MIN - 1
    ended = await run_process(folder, *serve_with(few, few), "--data-dir", str(folder / "data"))
    assert ended.status == 1
    assert f"a process may open only {few} files here; a server needs {FILES_MIN}" in ended.stderr
    assert "ulimit -Hn" in ended.stderr
