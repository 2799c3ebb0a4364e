"""A command reports an address that is not a culm server."""

import pytest

from culm.cli.server import run_described
from culm.errors import NoServer
from culm.wire.codec import decode
from culm.wire.runs import Run


def test_an_invalid_response_is_reported_as_not_a_culm_server() -> None:
    async def look() -> Run:
        return decode(b"<html>", Run)

    with pytest.raises(NoServer, match="tcp://there:1 is not a culm server"):
        run_described(look(), "tcp://there:1")
