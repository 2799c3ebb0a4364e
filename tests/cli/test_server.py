"""What a command says of what answers it and is no server of ours."""

import pytest

from culm.cli.server import run_described
from culm.errors import NoServer
from culm.wire.codec import decode
from culm.wire.runs import Run


def test_what_does_not_speak_as_culm_does_is_no_server() -> None:
    async def look() -> Run:
        return decode(b"<html>", Run)

    with pytest.raises(NoServer, match="what answers at tcp://there:1 does not speak as culm does"):
        run_described(look(), "tcp://there:1")
