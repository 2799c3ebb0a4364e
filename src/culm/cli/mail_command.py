"""The options of `culm mail`. What its commands need is imported when they run."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

from culm.cli.commands import CommandGroup
from culm.cli.options import directory_option, json_option
from culm.cli.terminal.streams import need_output

EXPIRES_S_MAX = 366 * 86_400.0  # As on the wire, which help does without; a test holds it to it.

if TYPE_CHECKING:  # Only `click` is needed to print a help.
    from culm.cli.mail_place import KnownProject
    from culm.client.launch import ServerRequest

P = ParamSpec("P")
R = TypeVar("R")

ASK_S = 600  # A turn with a few calls takes minutes.
ASK_S_MAX = 86400  # Who waits for longer is gone: `culm doctor` takes its mailbox as left behind.

_TO_HELP = "An agent or a session, by its id, the beginning of it or its title: `culm agents`."

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="As for `culm serve`; mailboxes are found there.",
)
host_option = click.option(
    "--host",
    envvar="CULM_HOST",
    metavar="URL",
    help="The server to tell of it, as for `culm run`. None is started.",
)


def _of_project(command: Callable[P, R]) -> Callable[P, R]:
    return directory_option(data_dir_option(command))


def _project(directory: Path, data_dir: Path | None) -> "KnownProject":
    import os

    from culm.cli.mail_place import data_dir_of, get_project

    return get_project(directory, data_dir_of(data_dir, os.environ))


def _server(host: str | None, data_dir: Path | None) -> "ServerRequest":
    import os

    from culm.client.launch import ServerRequest
    from culm.settings import default_host

    return ServerRequest(host or default_host(os.environ), data_dir)


@click.group(cls=CommandGroup)
def mail() -> None:
    """Letters to the agents of a project, with or without a server.

    An agent that sleeps is woken by a letter. If no server runs, the letter waits for one.

    \b
    Example:
      culm agents
      culm mail send --to 68263f22 look at the last commit
      culm mail ask --to 68263f22 what did you find?
    """


@mail.command()
@click.argument("words", nargs=-1, required=True, metavar="TEXT...")
@click.option("--to", required=True, metavar="NAME", help=_TO_HELP)
@click.option(
    "--kind",
    type=click.Choice(["task", "handoff"]),
    default="task",
    show_default=True,
    help="Something to do, or what somebody else has done so far.",
)
@click.option("--from", "from_", default="", metavar="ID", help="The agent it comes from.")
@click.option(
    "--expires",
    "expires_s",
    type=click.FloatRange(0, EXPIRES_S_MAX, min_open=True),
    metavar="SECONDS",
    help="Nobody wants it read later than that.",
)
@host_option
@_of_project
def send(
    words: tuple[str, ...],
    to: str,
    kind: str,
    from_: str,
    expires_s: float | None,
    host: str | None,
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Put a letter into an agent's mailbox, and print the letter's id.

    TEXT is what it says; - reads it from stdin. When the command ends the letter is safe on disk,
    whether a server runs or not.

    \b
    Example:
      culm mail send --to 68263f22 look at the last commit
      git log -1 -p | culm mail send --to 68263f22 --kind handoff -
    """
    from typing import cast

    from culm.cli.mail import MailOptions, send_letter, text_given
    from culm.wire.agents import LetterKind

    given = cast("LetterKind", kind)  # The choices of the option are some of these.
    project, server = _project(directory, data_dir), _server(host, data_dir)
    expires_s = None if expires_s is None else _finite(expires_s, "--expires")
    send_letter(MailOptions(project, server, to, text_given(words), given, from_, expires_s))


@mail.command()
@click.argument("words", nargs=-1, required=True, metavar="QUESTION...")
@click.option("--to", required=True, metavar="NAME", help=_TO_HELP)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, ASK_S_MAX, min_open=True),
    default=ASK_S,
    show_default=True,
    metavar="SECONDS",
    help="Wait no longer for the answer.",
)
@json_option
@host_option
@_of_project
def ask(
    words: tuple[str, ...],
    to: str,
    timeout_s: float,
    as_json: bool,  # noqa: FBT001 - click passes by name
    host: str | None,
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Ask an agent something, wait for its answer and print it.

    QUESTION is - to read it from stdin. If no server runs, it waits for one. Ctrl-C ends the wait.
    A question that is not read when its time is over is not read any more.

    \b
    Exit status:
      0  it was answered
      1  it was not, or nobody could be asked; stderr says why
      2  wrong usage
      4  cancelled

    \b
    Example:
      culm mail ask --to 68263f22 which tests did you run?
    """
    need_output()
    from culm.cli.mail import MailOptions, text_given
    from culm.cli.mail_ask import ask_letter

    project, server = _project(directory, data_dir), _server(host, data_dir)
    sending = MailOptions(project, server, to, text_given(words))
    sys.exit(ask_letter(sending, _finite(timeout_s, "--timeout"), as_json=as_json))


@mail.command()
@click.argument("letter_id", metavar="LETTER")
@click.option("--to", default="", metavar="ID", help="Look only into this mailbox.")
@json_option
@_of_project
def status(
    letter_id: str,
    to: str,
    as_json: bool,  # noqa: FBT001
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Say what became of a letter; LETTER is its id, or the beginning of it.

    That is delivered (it lies in the mailbox), admitted (the agent has read it), answered by
    another letter, expired, or dead (nobody will read it).

    \b
    Example:
      culm mail status 0d3a1c52
    """
    from culm.cli.mail import show_status

    show_status(_project(directory, data_dir), letter_id, to, as_json=as_json)


@mail.command("list")
@click.option("--agent", default="", metavar="NAME", help="Only those from it and to it.")
@json_option
@_of_project
def list_(
    agent: str,
    as_json: bool,  # noqa: FBT001
    directory: Path,
    data_dir: Path | None,
) -> None:
    """List the letters of a project, the latest first.

    Each with its id, who wrote it to whom, how far it is, its age, and how its text begins.

    \b
    Example:
      culm mail list --agent 68263f22
    """
    from culm.cli.mail import show_letters

    show_letters(_project(directory, data_dir), agent, as_json=as_json)


def _finite(number: float, option: str) -> float:
    import math

    if not math.isfinite(number):
        raise click.UsageError(f"{option} is a number of seconds")
    return number
