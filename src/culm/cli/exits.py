"""How a command ends. Imports nothing: every command reads it at its start."""

EXIT_FAILED = 1
EXIT_USAGE = 2  # As click has it.
EXIT_CANCELED = 4
EXIT_CLOSED = 141  # As of any program whose reader has left.
