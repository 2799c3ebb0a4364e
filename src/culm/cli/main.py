"""`culm`: the command line. Each command imports what it needs when it runs."""

import errno
import os
import sys
from pathlib import Path

import click

from culm import __version__
from culm.cli.agent_command import agent
from culm.cli.agents_command import agents
from culm.cli.asks_commands import answer, approve, asks, deny
from culm.cli.attach_command import attach
from culm.cli.commands import CommandGroup
from culm.cli.completion_command import completion
from culm.cli.config_commands import config, models, trust
from culm.cli.doctor_command import doctor
from culm.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_SERVER, EXIT_USAGE
from culm.cli.logs_command import logs
from culm.cli.mail_command import mail
from culm.cli.options import where_of
from culm.cli.run_command import run
from culm.cli.serve_command import serve
from culm.cli.sessions_command import sessions
from culm.cli.stats_command import stats
from culm.cli.terminal.streams import CannotWrite, fill_streams, is_terminal, let_go, write_note
from culm.cli.work_commands import ps, steer, stop
from culm.cli.worker_command import worker
from culm.errors import AppError, InvalidRequest, NoServer, NotFound

HELP_OPTIONS = ["-h", "--help"]


@click.group(
    cls=CommandGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": HELP_OPTIONS},
)
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def culm(ctx: click.Context) -> None:
    """One long-lived agent server that many clients share.

    Without a command, on a terminal: a prompt to talk with the agent of this directory. There
    @path in a prompt attaches a file (Tab completes it), !command runs a command of your own,
    Escape stops what runs, what is asked is answered in place, and /help says the rest. The arrows
    bring back what was typed before, also the last time.

    \b
    Example:
      culm                                   talk, with files (@path) and commands (!command)
      culm run what does this project do     one prompt, one answer
      culm asks                              what it waits for you to allow
      culm models                            which models it may ask, and why
      culm serve                             on your own socket
      culm serve --host tcp://127.0.0.1:0    on any free port, with a token

    \b
    Exit status:
      0  done                    4  cancelled
      1  failed; stderr says why 5  the budget or the time was used up
      2  wrong usage             6  there is no server, and none can be started
      3  denied                  128 + n  ended by signal n
    """
    if ctx.invoked_subcommand is not None:
        return
    if not (is_terminal() and sys.stdout is not None and sys.stdout.isatty()):
        click.echo(ctx.get_help())
        ctx.exit(EXIT_USAGE)
    where = where_of(Path(), os.environ.get("CULM_HOST"), None)
    starter = where.starter()
    starter.begin()
    # What follows takes about as long to import as a server takes to start.
    from culm.cli.talk import talk

    sys.exit(talk(where, starter))


for command in (
    *(run, attach, ps, steer, stop, asks, approve, deny, answer, sessions, stats, agents, mail),
    *(serve, logs, agent, worker),
    *(models, config, trust, doctor, completion),
):
    culm.add_command(command)


def main() -> None:
    """Run, and say what failed and what to do about it."""
    fill_streams()
    try:
        sys.exit(culm.main(prog_name="culm", standalone_mode=False))
    except AppError as exc:
        _say(exc.message, exc.hint)
        sys.exit(status_of(exc))
    except click.UsageError as exc:
        about = exc.ctx.command_path if exc.ctx is not None else "culm"
        _say(
            " ".join(exc.format_message().split()), f"`{about} --help` explains it, with an example"
        )
        sys.exit(exc.exit_code)
    except click.ClickException as exc:
        _say(exc.format_message())
        sys.exit(exc.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except CannotWrite as exc:
        sys.exit(let_go(exc))
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        sys.exit(let_go(CannotWrite(exc)))


def status_of(exc: AppError) -> int:
    match exc:
        case InvalidRequest() | NotFound():
            return EXIT_USAGE
        case NoServer():
            return EXIT_NO_SERVER
        case _:
            return EXIT_FAILED


def _say(message: str, hint: str = "") -> None:
    write_note(f"culm: {message}")
    if hint:
        write_note(f"hint: {hint}")
