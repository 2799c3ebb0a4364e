"""Workers that mean ill, as real processes: each costs its own run, and nobody else anything."""

from dataclasses import dataclass
from pathlib import Path

from culm.fleet.protocol.frames import MESSAGE_BYTES_MAX
from culm.fleet.tail import KEPT_BYTES
from tests.live.fleet_desk import FleetDesk, nothing_left, open_desk, until
from tests.live.fleet_hostile import FLOOD_FRAMES, FRAME_BYTES
from tests.live.fleet_owner import FIRST_FRAME_S, Ended
from tests.live.test_tools_kill import memory_bytes
from tests.support import contract

CLOSED = "the worker closed the link before the run ended"
PRINTED = "; it printed last:\n"
TOO_LARGE = f"exceeds limit {MESSAGE_BYTES_MAX + 1}"
# One message of the size that is allowed, as it comes in and put together.
GROWTH_BYTES_MAX = 2 * MESSAGE_BYTES_MAX + (48 << 20)


@dataclass(frozen=True, slots=True)
class Way:
    """How a worker means ill, and what becomes of its run."""

    error: str
    launches: int  # A second one, if nothing was heard of the first.
    events: int = 0
    fleet: str = "patient"


WAYS = {
    "hangs": Way(f"the worker said nothing for {FIRST_FRAME_S:g} s", 2, fleet="impatient"),
    "is killed": Way("the worker ended before it was ready: ended by SIGKILL", 2),
    "dies": Way(f"{CLOSED}{PRINTED}a segment is at fault", 2),
    "dies at work": Way(f"{CLOSED}{PRINTED}out of luck", 1, events=1),
    "garbage": Way("the worker sent what cannot be read: Input data was truncated", 1),
    "noise": Way("the link to the worker was lost: Received frame with non-zero reserved bits", 2),
    "large": Way(
        f"the link to the worker was lost: Message size {FRAME_BYTES} {TOO_LARGE}"
        f"{PRINTED}it is large",
        2,
    ),
    "fragments": Way("the link to the worker was lost: Message size ", 1, events=1),
}


def name_of(how: str) -> str:
    return how.replace(" ", "-")


def launches(desk: FleetDesk, how: str) -> int:
    return len((desk.folder / "project" / name_of(how)).read_text().split())


@contract("FLEET-55", "FLEET-98", "FLEET-99")
async def test_a_hostile_worker_ends_its_run_with_the_reason_and_harms_nobody_else(
    folder: Path,
) -> None:
    async with open_desk(folder) as desk:
        desk.begin("first", "__sleep_ms:1500 slow but sure")
        desk.begin("echo", "hello")
        assert (await desk.end("echo")).text == "echo: hello"
        before_bytes = memory_bytes(desk.pid, "VmRSS")
        for how, way in WAYS.items():
            desk.begin(name_of(how), "go", role=how, fleet=way.fleet)
        desk.begin("floods", "go", role="floods", fleet="patient", is_quiet=True)
        desk.begin("shouts", "go", role="shouts", fleet="patient")
        desk.begin("is-never-ready", "go", role="is never ready", fleet="patient")
        desk.begin("meanwhile", "one two")

        for how, way in WAYS.items():
            ended = await desk.end(name_of(how))
            began = way.launches == 1
            assert ended == Ended(name_of(how), "error", ended.text, way.events, began)
            assert ended.text.startswith(way.error), ended
            assert launches(desk, how) == way.launches
        assert (await desk.end("first")).text == "echo: slow but sure"
        assert (await desk.end("meanwhile")).text == "echo: one two"

        all_of_it = f"{CLOSED}{PRINTED}that was all"
        assert await desk.end("floods") == Ended(
            "floods", "error", all_of_it, FLOOD_FRAMES, began=True
        )
        for name, first, last, launched in (
            ("shouts", f"{CLOSED}{PRINTED}", "hoarse", 2),
            (
                "is-never-ready",
                "the worker ended before it was ready: exit status 1\n",
                "no time today",
                1,
            ),
        ):
            ended = await desk.end(name)
            assert ended.text == f"{first}{'x' * (KEPT_BYTES - len(last))}{last}"
            assert (ended.status, launches(desk, name)) == ("error", launched)
        assert memory_bytes(desk.pid, "VmHWM") - before_bytes < GROWTH_BYTES_MAX

        # Only our own wait for more work: what meant ill is gone.
        await until(
            lambda: desk.look().pids("commands", "wardens") == [], lambda: desk.look().names
        )
        seen = await desk.seen(workers=2)
        await desk.leave()
        await nothing_left(folder, seen)
