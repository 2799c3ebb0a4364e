"""`culm`: the command line. Each command imports what it needs when it runs."""

import errno
import sys

import click

from culm import __version__
from culm.cli.agent_command import agent
from culm.cli.agents_command import agents
from culm.cli.asks_commands import answer, asks, ps, stop
from culm.cli.config_commands import config, models, trust
from culm.cli.doctor_command import doctor
from culm.cli.exits import EXIT_FAILED, EXIT_USAGE
from culm.cli.mail_command import mail
from culm.cli.run_command import run
from culm.cli.serve_command import serve
from culm.cli.streams import CannotWrite, fill_streams, let_go
from culm.cli.worker_command import worker
from culm.errors import AppError, InvalidRequest

# 0 is a clean end; 4 a cancelled run; 128 + n a second signal n.

HELP_OPTIONS = ["-h", "--help"]


@click.group(context_settings={"help_option_names": HELP_OPTIONS})
@click.version_option(__version__, message="%(version)s")
def culm() -> None:
    """One long-lived agent server that many clients share.

    \b
    Example:
      culm run what does this project do     one prompt, one answer
      culm asks                              what it waits for you to allow
      culm models                            which models it may ask, and why
      culm serve                             on your own socket
      culm serve --host tcp://127.0.0.1:0    on any free port, with a token
    """


for command in (
    *(run, asks, answer, ps, agents, stop, mail, serve, agent, worker),
    *(models, config, trust, doctor),
):
    culm.add_command(command)


def main() -> None:
    """Run, and say what failed and what to do about it."""
    fill_streams()
    try:
        culm()
    except AppError as exc:
        click.echo(f"culm: {exc.message}", err=True)
        if exc.hint:
            click.echo(f"hint: {exc.hint}", err=True)
        sys.exit(EXIT_USAGE if isinstance(exc, InvalidRequest) else EXIT_FAILED)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        sys.exit(let_go(CannotWrite(exc)))
