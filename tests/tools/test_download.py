"""`download` creates a complete new file or nothing at all."""

import asyncio
import gzip
import os
from pathlib import Path

import pytest
from aiohttp import web

from culm.tools.base import CallPlan, CallResult, ResolvedAction
from culm.tools.download import BATCH_BYTES, make_download
from culm.wire.codec import Json
from tests.support import WAIT_S, FakeClock, run_call
from tests.tools.conftest import ToolHarness, call_of, open_tool_harness, refused, run
from tests.tools.sites import cut_short, endless, open_site, redirect_to, respond_with

BYTES_MAX = 3 * BATCH_BYTES


async def download(
    harness: ToolHarness, url: str, file_path: str = "new", **more: int
) -> CallResult:
    async with asyncio.timeout(WAIT_S):
        call = call_of("download", {"url": url, "file_path": file_path, **more})
        return await run_call(make_download(harness.context, None, BYTES_MAX), call)


async def planned(harness: ToolHarness, **arguments: Json) -> CallPlan:
    plan = await make_download(harness.context).prepare(call_of("download", arguments))
    assert isinstance(plan, CallPlan), plan
    return plan


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def is_open(folder: Path) -> bool:
    """Tell if this process has a file in `folder` open, where /proc shows it."""
    links = (one.readlink() for one in Path("/proc/self/fd").glob("*") if one.is_symlink())
    return any(link.is_relative_to(folder) for link in links)


async def test_the_response_is_saved_as_a_new_file(harness: ToolHarness) -> None:
    data = os.urandom(2 * BATCH_BYTES + 7)
    zipped = respond_with(gzip.compress(b"a"), 200, "application/x-thing", Content_Encoding="gzip")
    async with open_site(redirect_to("/1"), respond_with(data, kind="image/png"), zipped) as (
        at,
        _,
    ):
        assert await download(harness, f"http://{at}/", "a/b/new.png") == CallResult(
            f"a/b/new.png was saved: 2.0 MiB, image/png (redirected to http://{at}/1)."
        )
        assert await download(harness, f"http://{at}/2") == CallResult(
            "new was saved: 1 bytes, application/x-thing."
        )
    assert (harness.path / "a/b/new.png").read_bytes() == data
    assert (harness.path / "new").read_bytes() == b"a"
    assert names_in(harness.path) == ["a", "b", "new", "new.png"]


async def test_an_approval_request_shows_the_url_and_the_target_file(
    harness: ToolHarness, outside: Path
) -> None:
    file = outside / "new"
    plan = await planned(harness, url="http://127.0.0.1:9", file_path=str(file), timeout=3)
    assert plan.action == ResolvedAction(
        "download",
        "download",
        description=f"Download http://127.0.0.1:9/ at 127.0.0.1 (this machine) to {file}",
        path=str(outside),
        params={"url": "http://127.0.0.1:9/", "file_path": str(file), "timeout": 3},
        resolved={"url": "http://127.0.0.1:9/", "private": ["127.0.0.1"], "path": str(file)},
        paths=(str(file),),
        coverage=(f"download:127.0.0.1:9@127.0.0.1 into {outside}",),
        why="127.0.0.1 is not on the public network: 127.0.0.1 (this machine); "
        f"{file} is outside the workspace",
    )
    inside = (await planned(harness, url="http://1.1.1.1/x", file_path="./a//new")).action
    assert inside.paths == (str(harness.context.paths.root / "a" / "new"),)
    assert (inside.why, inside.coverage) == (
        "",
        (f"download:http://1.1.1.1:80 into {harness.context.paths.root}/a",),
    )


async def test_an_existing_file_is_never_replaced(harness: ToolHarness, outside: Path) -> None:
    taken = "{} already exists and is not replaced. Use another name."
    harness.write("old", "old")
    (harness.path / "link").symlink_to(outside / "secret.txt")
    async with open_site(respond_with("new")) as (at, _):
        assert await download(harness, f"http://{at}/", "old") == refused(taken.format("old"))
        assert await download(harness, f"http://{at}/", "link") == refused(
            taken.format(outside / "secret.txt")
        )
        for make in (
            lambda: harness.write("new", "mine"),
            lambda: (harness.path / "new2").symlink_to(outside / "made"),
        ):
            name = "new" if not (harness.path / "new").exists() else "new2"
            plan = await planned(harness, url=f"http://{at}/", file_path=name)
            make()
            assert await run(plan) == refused(taken.format(name))
        plan = await planned(harness, url=f"http://{at}/", file_path="sub/new")
        (harness.path / "sub").symlink_to(outside)
        assert (await run(plan)).is_error
    assert (harness.path / "new").read_text() == "mine"
    assert names_in(outside) == ["secret.txt"]
    assert names_in(harness.path) == ["link", "new", "new2", "old", "sub"]


async def huge(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(BYTES_MAX + 1)})
    await response.prepare(request)
    return response


async def test_an_incomplete_download_leaves_no_file(harness: ToolHarness) -> None:
    bomb = gzip.compress(bytes(BYTES_MAX + 1))
    bad = {
        "has more than 3.0 MiB; nothing was saved.": huge,
        "has more than 3.0 MiB": respond_with(bomb, Content_Encoding="gzip"),
        "answered 404 Not Found; nothing was saved.": respond_with("", 404),
        "ended before the response was complete": cut_short,
        "redirects to an invalid URL": redirect_to("ftp://x/"),
    }
    async with open_site(*bad.values()) as (at, _):
        for n, expected in enumerate(bad):
            result = await download(harness, f"http://{at}/{n}", f"{n}")
            assert result.is_error
            assert expected in result.content
    assert names_in(harness.path) == []
    assert not is_open(harness.path)


@pytest.mark.parametrize("ending", ["cancelled", "late"])
async def test_a_canceled_or_late_download_leaves_no_file(folder: Path, ending: str) -> None:
    clock = FakeClock()
    began = asyncio.Event()

    async def trickle(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x" * (BATCH_BYTES + 1))
        began.set()
        await asyncio.Event().wait()
        return response

    async with open_tool_harness(folder, clock) as harness, open_site(trickle, endless) as (at, _):
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(download(harness, f"http://{at}/", timeout=9))
            await began.wait()
            if ending == "late":
                clock.advance(9)
            else:
                task.cancel()
            await asyncio.wait({task})
        if ending == "late":
            message = f"http://{at}/ took more than 9 seconds; nothing was saved."
            assert task.result() == refused(message)
        assert names_in(folder) == []
        assert not is_open(harness.path)
