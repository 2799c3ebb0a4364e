"""The options of `culm run`, and its prompt. What it needs is imported when it runs."""

import sys
from typing import TYPE_CHECKING

import click

from culm.cli.exits import EXIT_CANCELED
from culm.cli.options import at_own_server
from culm.cli.streams import is_terminal, need_output
from culm.errors import InvalidRequest

if TYPE_CHECKING:
    from culm.cli.place import Where
    from culm.wire.rules import Approve

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
    "-c", "--continue", "latest", is_flag=True, help="Go on in the session that was used last."
)
@click.option("-s", "--session", default="", metavar="ID", help="Go on in this session.")
@click.option(
    "--approve",
    type=click.Choice(["ask", "allow", "deny"]),
    default="ask",
    help="What happens to a call that needs permission, unless --allow or --deny says it. "
    "Default: ask.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="RULE",
    help="Allow such calls: edit, 'edit:src/**', 'bash:make test'. May be repeated.",
)
@click.option("--deny", multiple=True, metavar="RULE", help="Deny such calls; outweighs --allow.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line on stdout.")
@at_own_server
def run(
    words: tuple[str, ...],
    model: str,
    latest: bool,  # noqa: FBT001
    session: str,
    approve: str,
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    as_json: bool,  # noqa: FBT001
    where: "Where",
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

    With --json the lines are {"type": "text", "text", "message_id"}, "again" (the message's text
    so far is void), "call" (id, name, input), "output" (id, text: what it puts out as it runs),
    "ask" (id, call_id, tool, action, description), "answered" (id, call_id, state), "allowed"
    (call_id: by a rule or an earlier answer), "result" (id, is_error, content) and at last "end"
    (outcome, run_id, session_id, text, error, what was used, also by the tree of agents). Of an
    agent they are "agent_started", "agent_text", "agent_call" and so on to "agent_ended", with
    agent_id and session_id.

    \b
    Exit status:
      0        the answer is complete
      1        it is not, or nothing could be asked; stderr says why
      2        wrong usage
      4        cancelled, by you or by another client
      128 + n  ended at once by a second signal n; 141: nobody reads stdout

    \b
    Example:
      culm run what does this project do
      git diff | culm run review this
      culm run --allow edit --allow 'bash:make *' mend the failing test
    """
    _leave_on_interrupt()  # Until there is something to cancel.
    need_output()
    prompt = _read_prompt(words)
    if latest and session:
        raise click.UsageError("--session and --continue exclude each other")
    # Before a server is started for nothing.
    approved = _approved(approve, allow, deny)
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
        as_json=as_json,
        approve=approved,
        interactive=not as_json and is_terminal(),
    )
    sys.exit(run_prompt(options, starter))


def _leave_on_interrupt() -> None:
    import os
    import signal

    def leave(*_: object) -> None:
        os.write(2, b"culm: cancelled, nothing was asked\n")
        os._exit(EXIT_CANCELED)

    signal.signal(signal.SIGINT, leave)


def _approved(mode: str, allow: tuple[str, ...], deny: tuple[str, ...]) -> "Approve | None":
    if mode == "ask" and not allow and not deny:
        return None
    from culm.cli.rules import approve_of

    return approve_of(mode, allow, deny)


def _tell_if_silent(descriptor: int) -> None:
    """A pipe that nobody writes into keeps us waiting, and whoever waits should know why."""
    import select

    if not select.select([descriptor], [], [], SILENT_S)[0]:
        click.echo("culm: reading stdin; give </dev/null if nothing comes", err=True)


def _read_prompt(words: tuple[str, ...]) -> str:
    """What was typed, with what was piped in below it."""
    pieces = [" ".join(words).strip()]
    if sys.stdin is not None and not sys.stdin.isatty():
        _tell_if_silent(sys.stdin.fileno())
        piped = sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)
        if len(piped) > STDIN_BYTES_MAX:
            raise click.UsageError(f"stdin may have at most {STDIN_BYTES_MAX >> 20} MiB")
        pieces.append(piped.decode(errors="replace").strip())
    prompt = "\n\n".join(filter(None, pieces))
    if not prompt:
        raise InvalidRequest("there is no prompt", hint="culm run what does this project do")
    return prompt
