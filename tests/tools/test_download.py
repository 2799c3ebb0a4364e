"""`download` makes a new file, whole or not at all, and leaves nothing else behind."""

import asyncio
import gzip
import os
from pathlib import Path

import pytest
from aiohttp import web

from culm.tools.base import CallPlan, CallResult, ResolvedAction
from culm.tools.download import BATCH_BYTES, make_download
from culm.wire.codec import Json
from tests.support import WAIT_S, FakeClock, carried_out
from tests.tools.conftest import Desk, call_of, open_desk, refused, run
from tests.tools.sites import cut_short, endless, leads_to, open_site, says

BYTES_MAX = 3 * BATCH_BYTES


async def download(desk: Desk, url: str, file_path: str = "new", **more: int) -> CallResult:
    async with asyncio.timeout(WAIT_S):
        call = call_of("download", {"url": url, "file_path": file_path, **more})
        return await carried_out(make_download(desk.context, None, BYTES_MAX), call)


async def planned(desk: Desk, **arguments: Json) -> CallPlan:
    plan = await make_download(desk.context).prepare(call_of("download", arguments))
    assert isinstance(plan, CallPlan), plan
    return plan


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def is_open(folder: Path) -> bool:
    """Whether something of it is open in this process, where that can be seen."""
    links = (one.readlink() for one in Path("/proc/self/fd").glob("*") if one.is_symlink())
    return any(link.is_relative_to(folder) for link in links)


async def test_what_is_asked_for_is_a_file_afterwards(desk: Desk) -> None:
    data = os.urandom(2 * BATCH_BYTES + 7)
    zipped = says(gzip.compress(b"a"), 200, "application/x-thing", Content_Encoding="gzip")
    async with open_site(leads_to("/1"), says(data, kind="image/png"), zipped) as (at, _):
        assert await download(desk, f"http://{at}/", "a/b/new.png") == CallResult(
            f"a/b/new.png is there: 2.0 MiB, image/png (redirected to http://{at}/1)."
        )
        assert await download(desk, f"http://{at}/2") == CallResult(
            "new is there: 1 bytes, application/x-thing."
        )
    assert (desk.path / "a/b/new.png").read_bytes() == data
    assert (desk.path / "new").read_bytes() == b"a"
    assert names_in(desk.path) == ["a", "b", "new", "new.png"]


async def test_a_person_sees_what_goes_where(desk: Desk, outside: Path) -> None:
    file = outside / "new"
    plan = await planned(desk, url="http://127.0.0.1:9", file_path=str(file), timeout=3)
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
    inside = (await planned(desk, url="http://1.1.1.1/x", file_path="./a//new")).action
    assert inside.paths == (str(desk.context.inside.root / "a" / "new"),)
    assert (inside.why, inside.coverage) == (
        "",
        (f"download:http://1.1.1.1:80 into {desk.context.inside.root}/a",),
    )


async def test_no_file_is_replaced_neither_before_the_ask_nor_after_it(
    desk: Desk, outside: Path
) -> None:
    taken = "There is a {} already, and it is not replaced. Use another name."
    desk.write("old", "old")
    (desk.path / "link").symlink_to(outside / "secret.txt")
    async with open_site(says("new")) as (at, _):
        assert await download(desk, f"http://{at}/", "old") == refused(taken.format("old"))
        assert await download(desk, f"http://{at}/", "link") == refused(
            taken.format(outside / "secret.txt")
        )
        for make in (
            lambda: desk.write("new", "mine"),
            lambda: (desk.path / "new2").symlink_to(outside / "made"),
        ):
            name = "new" if not (desk.path / "new").exists() else "new2"
            plan = await planned(desk, url=f"http://{at}/", file_path=name)
            make()
            assert await run(plan) == refused(taken.format(name))
        plan = await planned(desk, url=f"http://{at}/", file_path="sub/new")
        (desk.path / "sub").symlink_to(outside)
        assert (await run(plan)).is_error
    assert (desk.path / "new").read_text() == "mine"
    assert names_in(outside) == ["secret.txt"]
    assert names_in(desk.path) == ["link", "new", "new2", "old", "sub"]


async def huge(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(BYTES_MAX + 1)})
    await response.prepare(request)
    return response


async def test_what_does_not_come_whole_leaves_nothing(desk: Desk) -> None:
    bomb = gzip.compress(bytes(BYTES_MAX + 1))
    bad = {
        "has more than 3.0 MiB; nothing was kept.": huge,
        "has more than 3.0 MiB": says(bomb, Content_Encoding="gzip"),
        "answered 404 Not Found; nothing was kept.": says("", 404),
        "ended within its answer": cut_short,
        "redirects to what cannot be followed": leads_to("ftp://x/"),
    }
    async with open_site(*bad.values()) as (at, _):
        for n, expected in enumerate(bad):
            result = await download(desk, f"http://{at}/{n}", f"{n}")
            assert result.is_error
            assert expected in result.content
    assert names_in(desk.path) == []
    assert not is_open(desk.path)


@pytest.mark.parametrize("ending", ["cancelled", "late"])
async def test_an_endless_one_that_is_stopped_leaves_nothing(folder: Path, ending: str) -> None:
    clock = FakeClock()
    began = asyncio.Event()

    async def trickle(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x" * (BATCH_BYTES + 1))
        began.set()
        await asyncio.Event().wait()
        return response

    async with open_desk(folder, clock) as desk, open_site(trickle, endless) as (at, _):
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(download(desk, f"http://{at}/", timeout=9))
            await began.wait()
            if ending == "late":
                clock.advance(9)
            else:
                task.cancel()
            await asyncio.wait({task})
        if ending == "late":
            said = f"http://{at}/ took more than 9 seconds; nothing was kept."
            assert task.result() == refused(said)
        assert names_in(folder) == []
        assert not is_open(desk.path)
