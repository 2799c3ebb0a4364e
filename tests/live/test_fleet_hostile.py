"""Hostile workers as real processes: each fails its own run and no other."""

from dataclasses import dataclass
from pathlib import Path

from culm.fleet.protocol.frames import MESSAGE_BYTES_MAX
from culm.fleet.tail import KEPT_BYTES
from tests.live.fleet_harness import FleetHarness, open_fleet_harness, until, until_nothing_left
from tests.live.fleet_hostile import FLOOD_FRAMES, FRAME_BYTES
from tests.live.fleet_owner import FIRST_FRAME_S, Ended
from tests.live.test_tools_kill import memory_bytes
from tests.support import contract

CLOSED = "the worker closed the link before the run ended"
PRINTED = "; last output:\n"
TOO_LARGE = f"exceeds limit {MESSAGE_BYTES_MAX + 1}"
# One message of the allowed size, as received and as assembled.
GROWTH_BYTES_MAX = 2 * MESSAGE_BYTES_MAX + (48 << 20)


@dataclass(frozen=True, slots=True)
class Behavior:
    """A hostile behavior, and the expected end of its run."""

    error: str
    launches: int  # Two if the first one sent nothing.
    events: int = 0
    fleet: str = "patient"


BEHAVIORS = {
    "hangs": Behavior(f"the worker sent nothing for {FIRST_FRAME_S:g} s", 2, fleet="impatient"),
    "is killed": Behavior("the worker ended before it was ready: ended by SIGKILL", 2),
    "dies": Behavior(f"{CLOSED}{PRINTED}a segment is at fault", 2),
    "dies at work": Behavior(f"{CLOSED}{PRINTED}out of luck", 1, events=1),
    "garbage": Behavior("the worker sent an unreadable frame: Input data was truncated", 1),
    "noise": Behavior(
        "the link to the worker was lost: Received frame with non-zero reserved bits", 2
    ),
    "large": Behavior(
        f"the link to the worker was lost: Message size {FRAME_BYTES} {TOO_LARGE}"
        f"{PRINTED}it is large",
        2,
    ),
    "fragments": Behavior("the link to the worker was lost: Message size ", 1, events=1),
}


def name_of(how: str) -> str:
    return how.replace(" ", "-")


def launches(harness: FleetHarness, how: str) -> int:
    return len((harness.folder / "project" / name_of(how)).read_text().split())


@contract("FLEET-55", "FLEET-98", "FLEET-99")
async def test_hostile_worker_fails_only_its_own_run_with_the_reason(
    folder: Path,
) -> None:
    async with open_fleet_harness(folder) as harness:
        harness.begin("first", "__sleep_ms:1500 slow but sure")
        harness.begin("echo", "hello")
        assert (await harness.end("echo")).text == "echo: hello"
        before_bytes = memory_bytes(harness.pid, "VmRSS")
        for how, behavior in BEHAVIORS.items():
            harness.begin(name_of(how), "go", role=how, fleet=behavior.fleet)
        harness.begin("floods", "go", role="floods", fleet="patient", is_quiet=True)
        harness.begin("shouts", "go", role="shouts", fleet="patient")
        harness.begin("is-never-ready", "go", role="is never ready", fleet="patient")
        harness.begin("meanwhile", "one two")

        for how, behavior in BEHAVIORS.items():
            ended = await harness.end(name_of(how))
            began = behavior.launches == 1
            assert ended == Ended(name_of(how), "error", ended.text, behavior.events, began)
            assert ended.text.startswith(behavior.error), ended
            assert launches(harness, how) == behavior.launches
        assert (await harness.end("first")).text == "echo: slow but sure"
        assert (await harness.end("meanwhile")).text == "echo: one two"

        all_of_it = f"{CLOSED}{PRINTED}that was all"
        assert await harness.end("floods") == Ended(
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
            ended = await harness.end(name)
            assert ended.text == f"{first}{'x' * (KEPT_BYTES - len(last))}{last}"
            assert (ended.status, launches(harness, name)) == ("error", launched)
        assert memory_bytes(harness.pid, "VmHWM") - before_bytes < GROWTH_BYTES_MAX

        # Only our own idle workers are left: the hostile ones are gone.
        await until(
            lambda: harness.processes().pids("commands", "shims") == [],
            lambda: harness.processes().names,
        )
        processes = await harness.until_processes(workers=2)
        await harness.shut_down()
        await until_nothing_left(folder, processes)
