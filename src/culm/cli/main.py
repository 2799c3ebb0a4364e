"""`culm`: the command line. A command's module is imported when the command is used."""

import errno
import gc
import os
import sys
from pathlib import Path

import click

from culm import __version__
from culm.cli.groups import LazyCommand, LazyGroup
from culm.cli.terminal.process import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NO_SERVER,
    EXIT_USAGE,
    CannotWrite,
    close_output,
    is_terminal,
    replace_closed_streams,
    report_error,
)
from culm.errors import AppError, InvalidRequest, NoServer, NotFound

HELP_OPTIONS = ["-h", "--help"]
# Python looks for cycles after 700 new objects, hundreds of times while modules are imported.
GC_OBJECTS = 10_000

# Name, module in `culm.cli.commands`, and the first sentence of the help, which a test compares
# with the command's own. In the order of docs/cli.md.
_TABLE = (
    ("run", "run", "Send a prompt to the agent and print the answer."),
    ("attach", "attach", "Follow a run or a session live, from its start."),
    ("ps", "ps", "Show active runs, agents and processes."),
    ("steer", "steer", "Send a message to an active run, read before its next step."),
    ("stop", "stop", "Stop runs, sessions or agents, with everything below them."),
    ("asks", "asks", "List open permission requests and questions."),
    ("approve", "asks", "Approve permission requests listed by `culm asks`."),
    ("deny", "asks", "Deny permission requests listed by `culm asks`."),
    ("answer", "asks", "Answer a question listed by `culm asks`."),
    ("sessions", "sessions", "List, show, rename, delete and export sessions."),
    ("stats", "stats", "Show runs, tokens and cost by model, day and session."),
    ("agents", "agents", "List the agents of a project as a tree."),
    ("mail", "mail", "Send letters to agents, with or without a running server."),
    ("serve", "serve", "Run the server until it is idle, or until SIGTERM or SIGINT."),
    ("logs", "logs", "Show the server log, the latest entries last."),
    ("agent", "agent", "Start, list and call standalone agents."),
    ("worker", "worker", "Run a worker for a provision read from stdin."),
    ("models", "models", "Show which models are usable, and why."),
    ("config", "config", "Check and show the configuration files."),
    ("trust", "trust", "Trust the configuration files of a project."),
    ("doctor", "doctor", "Check the machine, the server and the stored data."),
    ("completion", "completion", "Print a shell completion script."),
)
COMMANDS = tuple(
    LazyCommand(name, f"culm.cli.commands.{module}", name, short_help)
    for name, module, short_help in _TABLE
)


@click.group(
    cls=LazyGroup,
    commands=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": HELP_OPTIONS},
)
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def culm(ctx: click.Context) -> None:
    """Run coding agents on one server that many clients share.

    Without a command, on a terminal, start an interactive prompt for this directory. There @path
    attaches a file (Tab completes the path) and !command runs a shell command. Escape stops the
    current run, and permission requests are answered in place. The arrow keys recall earlier
    input, also of previous conversations. /help lists all commands.

    \b
    Example:
      culm                                   prompt, with files (@path) and commands (!command)
      culm run what does this project do     one prompt, one answer
      culm asks                              open permission requests and questions
      culm models                            usable models, and why
      culm serve                             on the per-user socket
      culm serve --host tcp://127.0.0.1:0    on any free port, with a token

    \b
    Exit status:
      0  success                 4  canceled
      1  failure; see stderr     5  budget or time limit reached
      2  usage error             6  no server, and none can be started
      3  denied                  128 + n  ended by signal n
    """
    if ctx.invoked_subcommand is not None:
        return
    if not (is_terminal() and sys.stdout is not None and sys.stdout.isatty()):
        click.echo(ctx.get_help())
        ctx.exit(EXIT_USAGE)
    # Only a conversation needs these. The server starts while the second is imported, which takes
    # about as long.
    from culm.cli.options import make_target

    where = make_target(Path(), os.environ.get("CULM_HOST"), None)
    starter = where.starter()
    starter.begin()
    from culm.cli.commands.talk import talk

    sys.exit(talk(where, starter))


def main() -> None:
    """Run `culm`, report an error with its hint, and exit."""
    gc.set_threshold(GC_OBJECTS)
    replace_closed_streams()
    try:
        sys.exit(culm.main(prog_name="culm", standalone_mode=False))
    except AppError as exc:
        report_error(exc.message, exc.hint)
        sys.exit(status_of(exc))
    except click.UsageError as exc:
        about = exc.ctx.command_path if exc.ctx is not None else "culm"
        report_error(" ".join(exc.format_message().split()), f"see `{about} --help`")
        sys.exit(exc.exit_code)
    except click.ClickException as exc:
        report_error(exc.format_message())
        sys.exit(exc.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except CannotWrite as exc:
        sys.exit(close_output(exc))
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        sys.exit(close_output(CannotWrite(exc)))


def status_of(exc: AppError) -> int:
    """The exit status for an error that no command handles."""
    match exc:
        case InvalidRequest() | NotFound():
            return EXIT_USAGE
        case NoServer():
            return EXIT_NO_SERVER
        case _:
            return EXIT_FAILED
