"""The user's own `!command`: run as typed, answered with its output and its exit code."""

from contextlib import AsyncExitStack

from culm.processes.base import ProcessExit, ProcessOwner, ProcessStartFailed
from culm.tools.process.environment import user_command_env
from culm.tools.process.exit_text import exit_text
from culm.tools.process.output import CommandOutput, OutputSizes
from culm.tools.process.running import CommandRequest, output_receiver, start
from culm.tools.process.waiting import within
from culm.tools.tool_context import ToolContext

WALL_S = 3600.0  # Whoever typed it can leave earlier, which ends it, too.
SHOWN_BYTES_MAX = 512 << 10  # It becomes part of a message.
NOT_STARTED = 126  # What a shell says of a command that is there and cannot be run.
TIMED_OUT = 124  # As `timeout` has it.
SIGNALLED = 128  # Plus the signal, as shells say it.


async def run_user_command(
    context: ToolContext, command: str, cwd: str, term_width: int, session_id: str = ""
) -> tuple[str, int]:
    """Run it to its end; cancelling ends it, and all it started. The output may have colours."""
    if "\0" in command:
        return "A command has no NUL character in it.\n", NOT_STARTED
    output = CommandOutput(None, OutputSizes(SHOWN_BYTES_MAX))
    env = user_command_env(context.env(), cwd, term_width)
    ordered = CommandRequest(
        command, cwd, env, ProcessOwner(context.workspace_id, "shell", session_id)
    )
    try:
        running = await start(
            context.processes, ordered, output_receiver(output), context.clock.now_s()
        )
    except ProcessStartFailed as exc:
        return f"The command could not be started: {exc}\n", NOT_STARTED
    async with AsyncExitStack() as ending:
        ending.push_async_callback(running.kill)
        ended = await within(context.clock, WALL_S, running.ended())
        text = output.text(keeps_colours=True)
        if ended is None:
            return f"{text}\nIt did not end within {WALL_S:g} seconds.\n", TIMED_OUT
        ending.pop_all()
    how = ended.exit
    notes = exit_text(ProcessExit(0, swept=how.swept, left=how.left, lost=how.lost))
    return (f"{text.rstrip()}\n{notes}\n" if notes else text), _code_of(how)


def _code_of(how: ProcessExit) -> int:
    if how.signal is not None:
        return SIGNALLED + how.signal
    return how.code if how.code is not None else 1
