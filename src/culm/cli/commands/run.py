"""`culm run`: the options and the prompt. `follow_run.py` sends it and follows the run."""

import os
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from culm.cli.options import ServerTarget, at_own_server, complete_session
from culm.cli.prompt_options import approve_of, limits_of, read_attachments
from culm.cli.terminal.process import EXIT_CANCELED, is_terminal, require_output
from culm.errors import InvalidRequest

if TYPE_CHECKING:  # It would import what `run` imports while the server starts.
    from culm.cli.follow_run import Output

SILENT_S = 1.0  # Input from a pipe usually arrives at once.
STDIN_BYTES_MAX = 4 << 20  # Far more than any model reads.


@click.command("run")
@click.argument("words", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "-m",
    "--model",
    default="",
    metavar="NAME",
    help="PROVIDER/MODEL, or MODEL if only one provider has it. For this run only.",
)
@click.option(
    "--role",
    default="",
    metavar="ROLE",
    help="Run as an agent with this role, in a session of its own: explorer, worker, reviewer, or "
    "a configured role.",
)
@click.option(
    "-c", "--continue", "latest", is_flag=True, help="Continue the most recently used session."
)
@click.option(
    "-s",
    "--session",
    default="",
    metavar="SESSION",
    shell_complete=complete_session,
    help="Continue this session, by id or title.",
)
@click.option(
    "-a",
    "--attach",
    "files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Attach a text file or an image. May be repeated.",
)
@click.option(
    "--approve",
    multiple=True,
    metavar="ask|auto|deny|RULE",
    help="How to handle permission requests: ask a person (the default), allow all (auto) or deny "
    "all. A RULE allows matching calls: edit, 'edit:src/**', 'bash:make test'. May be repeated.",
)
@click.option(
    "--deny", multiple=True, metavar="RULE", help="Deny matching calls, even if allowed otherwise."
)
@click.option(
    "--budget",
    multiple=True,
    metavar="AMOUNT",
    help="Limit for the run with all its agents: 0.50 (USD), 200ktokens or 20steps. May be "
    "repeated.",
)
@click.option("--timeout", default="", metavar="TIME", help="Time limit: 90s, 5m, 1h.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    help="What to print: the answer as it arrives, the result as one JSON object, or the whole run "
    "as a Markdown document. Default: text.",
)
@click.option(
    "-d", "--detach", is_flag=True, help="Print the run's id and exit; the run continues."
)
@at_own_server
def run(
    words: tuple[str, ...],
    model: str,
    role: str,
    latest: bool,
    session: str,
    files: tuple[Path, ...],
    approve: tuple[str, ...],
    deny: tuple[str, ...],
    budget: tuple[str, ...],
    timeout: str,
    as_json: bool,
    output: "Output",
    detach: bool,
    where: ServerTarget,
) -> None:
    """Send a prompt to the agent and print the answer.

    All words form the PROMPT. Piped input is appended to it, or is the prompt itself. If no server
    is running, one is started; it exits when it is no longer needed. The answer goes to stdout as
    it arrives; tool calls and everything else go to stderr. Lines of sub-agents begin with their
    names, and the last line shows the usage of all agents together.

    Permission requests (to change a file, run a command or fetch a page), also of sub-agents, are
    shown at this terminal and to every other client with a person. If nobody can be asked, the call
    is refused and the agent continues without it. A RULE is a tool, or a tool with a pattern for
    its command or files: a * on its own matches any number of words, ** any number of directories.
    Calls that the configuration denies stay denied.

    Ctrl-C cancels the run with all its agents and waits for its end. A second Ctrl-C exits at once;
    the run ends when the server has received the first. If this process is killed or its stdout is
    closed, the run continues.

    With --json each line is an object of docs/run-lines.schema.json ("text", "call", "result"; for
    a sub-agent "agent_text" and so on). The last one is "end", with outcome, answer and usage.
    --output json prints only that one.

    \b
    Exit status:
      0        the answer is complete
      1        failed; see stderr
      2        usage error, unknown name, or a file that cannot be attached; nothing was started
      3        a call was denied, which ended the run
      4        canceled, by you or by another client
      5        budget or time limit reached
      6        no server, and none can be started
      128 + n  ended at once by a second signal n; 141: stdout was closed

    \b
    Example:
      culm run what does this project do
      git diff | culm run review this
      culm run --approve edit --approve 'bash:make *' mend the failing test
      culm run --attach error.png --budget 0.50 --timeout 5m what is wrong here
    """
    _leave_on_interrupt()
    require_output()
    prompt = _read_prompt(words, needs_one=not files)
    _check_apart(session, role, files, output, latest=latest, as_json=as_json)
    # All options are checked before a server is started.
    approved = approve_of(approve, deny)
    limits, attachments = limits_of(budget, timeout), read_attachments(files)
    starter = where.starter()
    starter.begin()
    # Imported while the server starts, which takes about as long.
    from culm.cli.follow_run import RunOptions, run_prompt

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
    """Raises `click.UsageError` for options that exclude each other."""
    is_given = {
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
        if is_given[one] and is_given[other]:
            raise click.UsageError(f"{one} and {other} cannot be used together")


def _leave_on_interrupt() -> None:
    """Exit on Ctrl-C, as long as there is no run to cancel."""

    def leave(*_: object) -> None:
        os.write(2, b"culm: canceled before the prompt was sent\n")
        os._exit(EXIT_CANCELED)

    signal.signal(signal.SIGINT, leave)


def _report_waiting_for_input(descriptor: int) -> None:
    """Explain the wait for a pipe into which nothing is written."""
    if not select.select([descriptor], [], [], SILENT_S)[0]:
        click.echo("culm: waiting for stdin; use </dev/null if there is no input", err=True)


def _read_prompt(words: tuple[str, ...], *, needs_one: bool) -> str:
    """The prompt from the command line, with the text from stdin below it."""
    pieces = [" ".join(words).strip()]
    if sys.stdin is not None and not sys.stdin.isatty():
        _report_waiting_for_input(sys.stdin.fileno())
        try:
            piped = sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)
        except OSError as exc:
            raise InvalidRequest(f"cannot read stdin: {exc.strerror}") from exc
        if len(piped) > STDIN_BYTES_MAX:
            raise click.UsageError(f"stdin exceeds {STDIN_BYTES_MAX >> 20} MiB")
        pieces.append(piped.decode(errors="replace").strip())
    prompt = "\n\n".join(filter(None, pieces))
    if not prompt and needs_one:
        raise InvalidRequest(
            "no prompt given", hint="for example: culm run what does this project do"
        )
    return prompt
