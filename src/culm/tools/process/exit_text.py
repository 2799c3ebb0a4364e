"""How a command ended, in words to a model. Pure."""

import signal

from culm.processes.base import ProcessExit

PIDS_SHOWN_MAX = 20


def exit_text(how: ProcessExit) -> str:
    """One sentence a line; empty if it ended well and left nothing behind."""
    return "\n".join(line for line in (_left_behind(how), _left(how), status_text(how)) if line)


def status_text(how: ProcessExit) -> str:
    if how.lost:
        return (
            "The command was ended because the process that kept it died. What it had done until "
            "then is not known: look before you repeat it."
        )
    if how.signal is not None:
        return f"Ended by signal {how.signal} ({_signal_name(how.signal)})"
    return f"Exit code {how.code}" if how.code else ""


def _left_behind(how: ProcessExit) -> str:
    if not how.swept or how.lost:
        return ""
    if how.swept == 1:
        return "1 process it left behind was ended with it."
    return f"{how.swept} processes it left behind were ended with it."


def _left(how: ProcessExit) -> str:
    if not how.left:
        return ""
    pids = ", ".join(map(str, how.left[:PIDS_SHOWN_MAX]))
    more = f" and {len(how.left) - PIDS_SHOWN_MAX} more" if len(how.left) > PIDS_SHOWN_MAX else ""
    return f"Could not be ended, and may still be running: process {pids}{more}."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "no name"
