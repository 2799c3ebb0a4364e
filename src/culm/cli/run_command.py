"""The options of `culm run`, and its prompt. What it needs is imported when it runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from culm.cli.completing import complete_session
from culm.cli.exits import EXIT_CANCELED
from culm.cli.options import at_own_server
from culm.cli.terminal.streams import is_terminal, need_output
from culm.errors import InvalidRequest

if TYPE_CHECKING:
    from culm.cli.follow_run import Output
    from culm.cli.server_target import ServerTarget

SILENT_S = 1.0  # What is written into a pipe is usually there at once.
STDIN_BYTES_MAX = 4 << 20  # Far more than any model reads.


@click.command("run")
@click.argument("words", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "-m",
    "--model",
    default="",
    metavar="NAME",
    help="PROVIDER/MODEL, or MODEL if only one provider has it; for this run alone.",
)
@click.option(
    "--role",
    default="",
    metavar="ROLE",
    help="Let an agent of this role do it, in a session of its own: explorer, worker, reviewer, or "
    "one of your configuration.",
)
@click.option(
    "-c", "--continue", "latest", is_flag=True, help="Go on in the session that was used last."
)
@click.option(
    "-s",
    "--session",
    default="",
    metavar="SESSION",
    shell_complete=complete_session,
    help="Go on in this session: id or title.",
)
@click.option(
    "-a",
    "--attach",
    "files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Attach a text or an image. May be repeated.",
)
@click.option(
    "--approve",
    multiple=True,
    metavar="ask|auto|deny|RULE",
    help="What happens to a call that needs permission: ask a person, which is the default; allow "
    "it; deny it. Or allow such calls: edit, 'edit:src/**', 'bash:make test'. May be repeated.",
)
@click.option(
    "--deny", multiple=True, metavar="RULE", help="Deny such calls, whatever else allows them."
)
@click.option(
    "--budget",
    multiple=True,
    metavar="AMOUNT",
    help="What it may use up, with all its agents: 0.50 (USD), 200ktokens or 20steps. May be "
    "repeated.",
)
@click.option("--timeout", default="", metavar="TIME", help="How long it may take: 90s, 5m, 1h.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event on stdout.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    help="What stdout gets: the answer as it comes; the result as one object; the whole course of "
    "the run as a document. Default: text.",
)
@click.option("-d", "--detach", is_flag=True, help="Print the run's id and leave; it lives on.")
@at_own_server
def run(
    words: tuple[str, ...],
    model: str,
    role: str,
    latest: bool,  # noqa: FBT001 - click passes by name
    session: str,
    files: tuple[Path, ...],
    approve: tuple[str, ...],
    deny: tuple[str, ...],
    budget: tuple[str, ...],
    timeout: str,
    as_json: bool,  # noqa: FBT001
    output: "Output",
    detach: bool,  # noqa: FBT001
    where: "ServerTarget",
) -> None:
    """Ask the agent of this directory and print what it answers.

    PROMPT is all words together. What is piped in is added below it, or is the prompt. The server
    is found, or started on its socket; it leaves by itself when nobody needs it. The answer goes
    to stdout as it comes; calls of tools and everything else go to stderr. So does all that the
    agents do which work for it, in lines that begin with their names; the last line says what they
    have used together.

    What needs permission (to change a file, to run a command, to fetch a page) is asked, also for
    those agents: at this terminal if it is one, and of every other client with a person. Where
    nobody can be asked it is refused, and the agent goes on without. A RULE is a tool, or a tool
    with the command or the files it is for; a * alone stands for any number of words, ** for any
    number of directories. What the configuration denies stays denied.

    Ctrl-C cancels the run with all its agents and waits for its end; a second one leaves at once,
    and the run ends when the server has heard of the first. If this process is killed or nobody
    reads its stdout, the run goes on.

    With --json each line is an object of docs/run-lines.schema.json ("text", "call", "result", of
    an agent "agent_text" and so on), the last is "end": outcome, answer, what was used. --output
    json prints only that one.

    \b
    Exit status:
      0        the answer is complete
      1        it is not; stderr says why
      2        wrong usage, an unknown name, a file that cannot be attached; nothing was started
      3        a call was denied, which ended it
      4        cancelled, by you or by another client
      5        the budget or the time was used up
      6        there is no server, and none can be started
      128 + n  ended at once by a second signal n; 141: nobody reads stdout

    \b
    Example:
      culm run what does this project do
      git diff | culm run review this
      culm run --approve edit --approve 'bash:make *' mend the failing test
      culm run --attach error.png --budget 0.50 --timeout 5m what is wrong here
    """
    _leave_on_interrupt()  # Until there is something to cancel.
    need_output()
    prompt = _read_prompt(words, needs_one=not files)
    _check_apart(session, role, files, output, latest=latest, as_json=as_json)
    # Before a server is started for nothing.
    from culm.cli.asking import limits_of, read_attachments
    from culm.cli.rules import approve_of

    approved = approve_of(approve, deny)
    limits, attachments = limits_of(budget, timeout), read_attachments(files)
    starter = where.starter()
    starter.begin()
    # What follows takes about as long to import as a server takes to start.
    from culm.cli.run import RunOptions, run_prompt

    options = RunOptions(
        prompt=prompt,
        where=where,
        session=session,
        latest=latest,
        model=model,
        role=role,
        attachments=attachments,
        limits=limits,
        output="lines" if as_json else output,
        detach=detach,
        approve=approved,
        interactive=not as_json and not detach and is_terminal(),
    )
    sys.exit(run_prompt(options, starter))


def _check_apart(
    session: str, role: str, files: tuple[Path, ...], out: str, *, latest: bool, as_json: bool
) -> None:
    """Raises `click.UsageError` for what cannot be meant together."""
    given = {
        "--session": bool(session),
        "--continue": latest,
        "--role": bool(role),
        "--attach": bool(files),
        "--json": as_json,
        f"--output {out}": out != "text",
    }
    for one, other in (
        ("--session", "--continue"),
        ("--role", "--session"),
        ("--role", "--continue"),
        ("--role", "--attach"),
        ("--json", f"--output {out}"),
    ):
        if given[one] and given[other]:
            raise click.UsageError(f"{one} and {other} exclude each other")


def _leave_on_interrupt() -> None:
    import os
    import signal

    def leave(*_: object) -> None:
        os.write(2, b"culm: cancelled, nothing was asked\n")
        os._exit(EXIT_CANCELED)

    signal.signal(signal.SIGINT, leave)


def _report_waiting_for_input(descriptor: int) -> None:
    """A pipe that nobody writes into keeps us waiting, and whoever waits should know why."""
    import select

    if not select.select([descriptor], [], [], SILENT_S)[0]:
        click.echo("culm: reading stdin; give </dev/null if nothing comes", err=True)


def _read_prompt(words: tuple[str, ...], *, needs_one: bool) -> str:
    """What was typed, with what was piped in below it."""
    pieces = [" ".join(words).strip()]
    if sys.stdin is not None and not sys.stdin.isatty():
        _report_waiting_for_input(sys.stdin.fileno())
        try:
            piped = sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)
        except OSError as exc:
            raise InvalidRequest(f"cannot read stdin: {exc.strerror}") from exc
        if len(piped) > STDIN_BYTES_MAX:
            raise click.UsageError(f"stdin may have at most {STDIN_BYTES_MAX >> 20} MiB")
        pieces.append(piped.decode(errors="replace").strip())
    prompt = "\n\n".join(filter(None, pieces))
    if not prompt and needs_one:
        raise InvalidRequest("there is no prompt", hint="culm run what does this project do")
    return prompt
