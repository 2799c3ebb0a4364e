"""Letters and a server: what is brought to whom, in which order, and what becomes of the rest."""

from pathlib import Path

from culm.fleet.mailbox.base import Place
from culm.fleet.mailbox.letters import encode_letter
from culm.fleet.mailbox.order import name_of
from tests.flow.agents_stage import open_agents, talk
from tests.flow.mail_stage import (
    deliver,
    letter,
    post_of,
    read_in,
    ring,
    until_state,
)
from tests.support import contract


@contract("FLEET-72")
async def test_a_letter_that_is_nested_too_deeply_keeps_no_other_from_being_read(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, talk("@")) as stage:
        to = stage.session_id
        box = post_of(stage).make(to)
        folder = next((tmp_path / "data").glob(f"projects/*/mailboxes/{to}/new"))
        handoff = encode_letter(letter(stage, "deep", kind="handoff"))
        deep = handoff.replace(b'"@deep"', b'null, "a": ' + b"[" * 950 + b"]" * 950)
        (folder / name_of(1, "deep")).write_bytes(deep)
        deliver(stage, to, letter(stage, "good"))
        await ring(stage, to)
        await until_state(stage, "good", "admitted")
        await stage.until_idle()
        assert await read_in(stage) == ["good"]
        assert box.find("deep") is Place.CORRUPT
