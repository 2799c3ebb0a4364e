"""The user's own `!command`: run as typed; returns its output and its exit code."""

from contextlib import AsyncExitStack

from culm.clock import within
from culm.processes.base import ProcessExit, ProcessOwner, ProcessStartFailed
from culm.tools.base import ToolContext
from culm.tools.process.environment import user_command_env
from culm.tools.process.output import CommandOutput, OutputSizes
from culm.tools.process.running import CommandRequest, exit_text, output_receiver, start

WALL_S = 3600.0  # The user can leave earlier, which ends it, too.
SHOWN_BYTES_MAX = 512 << 10  # The output becomes part of a message.
NOT_STARTED = 126  # The exit code of a shell for a command that cannot be run.
TIMED_OUT = 124  # The exit code of `timeout`.
SIGNALLED = 128  # Plus the signal, as in shells.


async def run_user_command(
    context: ToolContext, command: str, cwd: str, term_width: int, session_id: str = ""
) -> tuple[str, int]:
    """Run a command to its end; cancelling ends it and all it started. Output may have colors."""
    if "\0" in command:
        return "The command contains a NUL character.\n", NOT_STARTED
    output = CommandOutput(None, OutputSizes(SHOWN_BYTES_MAX))
    env = user_command_env(context.env(), cwd, term_width)
    request = CommandRequest(
        command, cwd, env, ProcessOwner(context.workspace_id, "shell", session_id)
    )
    try:
        running = await start(
            context.processes, request, output_receiver(output), context.clock.now_s()
        )
    except ProcessStartFailed as exc:
        return f"The command could not be started: {exc}\n", NOT_STARTED
    async with AsyncExitStack() as ending:
        ending.push_async_callback(running.kill)
        result = await within(context.clock, WALL_S, running.ended())
        text = output.text(keeps_colours=True)
        if result is None:
            return f"{text}\nIt did not end within {WALL_S:g} seconds.\n", TIMED_OUT
        ending.pop_all()
    ended = result.exit
    notes = exit_text(ProcessExit(0, swept=ended.swept, left=ended.left, lost=ended.lost))
    return (f"{text.rstrip()}\n{notes}\n" if notes else text), _code_of(ended)


def _code_of(ended: ProcessExit) -> int:
    if ended.signal is not None:
        return SIGNALLED + ended.signal
    return ended.code if ended.code is not None else 1
