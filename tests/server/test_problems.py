"""Errors as responses."""

import errno

import aiohttp
import msgspec
import pytest
from aiohttp import web

from culm.server.problems import answer_to
from culm.wire.workspaces import Problem
from tests.tools.sites import open_site


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("grouped", [False, True])
async def test_lack_of_descriptors_is_503_with_a_reason(number: int, *, grouped: bool) -> None:
    lack = OSError(number, "Too many open files")
    error = ExceptionGroup("in a task group", [lack]) if grouped else lack

    async def fail(request: web.BaseRequest) -> web.StreamResponse:
        return answer_to(error, request)

    async with (
        open_site(fail) as (address, _),
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/0") as response,
    ):
        problem = msgspec.json.decode(await response.read(), type=Problem)
    assert (response.status, problem.code) == (503, "no_descriptors")
    assert problem.message == "the server has no free file descriptors"
