"""How a command ends. Imports nothing: every command reads it at its start."""

EXIT_FAILED = 1
EXIT_USAGE = 2  # As click has it.
EXIT_DENIED = 3
EXIT_CANCELED = 4
EXIT_SPENT = 5  # A budget, or the time that was given.
EXIT_NO_SERVER = 6
EXIT_INTERRUPTED = 130  # By Ctrl-C, where there was nothing to cancel.
EXIT_CLOSED = 141  # As of any program whose reader has left.
