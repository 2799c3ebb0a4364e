"""The options of `culm asks`, `culm approve`, `culm deny` and `culm answer`.

They look at a server that runs. What they need is imported when they run.
"""

import sys
from typing import TYPE_CHECKING

import click

from culm.cli.options import at_server, json_option

if TYPE_CHECKING:
    from culm.cli.asks import Action
    from culm.cli.server_target import ServerTarget

_FOR: "dict[str, Action]" = {
    "once": "allow",
    "session": "allow_session",
    "workspace": "allow_workspace",
}
_ids_argument = click.argument("ask_ids", nargs=-1, metavar="ID...")
_all_option = click.option("--all", "is_all", is_flag=True, help="All that is open here.")


@click.command()
@json_option
@at_server
def asks(
    as_json: bool,  # noqa: FBT001 - click passes by name
    where: "ServerTarget",
) -> None:
    """List what the agents of this directory wait for permission for, the latest first.

    Below that are their questions, with the choices there are. What an agent asks that works for
    another is listed with all agents that lead to it.

    \b
    Example:
      culm asks
      culm approve 68263f22
      culm answer 5b1f03aa 2
    """
    from culm.cli.asks import show_asks

    show_asks(where, as_json=as_json)


@click.command()
@_ids_argument
@click.option(
    "--for",
    "scope",
    type=click.Choice(list(_FOR)),
    default="once",
    show_default=True,
    help="Only this, or the like of it from now on, there.",
)
@_all_option
@at_server
def approve(
    ask_ids: tuple[str, ...],
    scope: str,
    is_all: bool,  # noqa: FBT001 - click passes by name
    where: "ServerTarget",
) -> None:
    """Allow what `culm asks` lists; the first answer counts, here or in another client.

    ID is an id or its beginning; there may be several. The exit status is 1 if one of them was not
    open any more.

    \b
    Example:
      culm approve 68263f22
      culm approve 68263f22 --for session
      culm approve --all
    """
    from culm.cli.asks import answer_permissions

    _check_which(ask_ids, is_all=is_all)
    sys.exit(answer_permissions(where, ask_ids, _FOR[scope]))


@click.command()
@_ids_argument
@_all_option
@at_server
def deny(
    ask_ids: tuple[str, ...],
    is_all: bool,  # noqa: FBT001 - click passes by name
    where: "ServerTarget",
) -> None:
    """Deny what `culm asks` lists, which ends the run that asks; the first answer counts.

    ID is an id or its beginning; there may be several.

    \b
    Example:
      culm deny 68263f22
      culm deny --all
    """
    from culm.cli.asks import answer_permissions

    _check_which(ask_ids, is_all=is_all)
    sys.exit(answer_permissions(where, ask_ids, "deny"))


@click.command()
@click.argument("ask_id", metavar="ID")
@click.argument("answers", nargs=-1, required=True, metavar="ANSWER...")
@at_server
def answer(
    ask_id: str,
    answers: tuple[str, ...],
    where: "ServerTarget",
) -> None:
    """Answer a question that `culm asks` lists; the first answer counts.

    ID is an id or its beginning. ANSWER is yes or no, the numbers of choices, or your own words;
    where several questions have one id, one ANSWER for each, quoted. Permissions are for `culm
    approve` and `culm deny`.

    \b
    Example:
      culm answer 5b1f03aa 2
      culm answer 5b1f03aa use the one in docs
    """
    from culm.cli.asks import answer_questions

    answer_questions(where, ask_id, answers)


def _check_which(ask_ids: tuple[str, ...], *, is_all: bool) -> None:
    context = click.get_current_context()
    if is_all and ask_ids:
        raise click.UsageError("give ids, or --all, not both", context)
    if not is_all and not ask_ids:
        raise click.UsageError("say which: ids that `culm asks` lists, or --all", context)
