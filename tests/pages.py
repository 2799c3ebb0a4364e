"""Pages generated from the code: `python -m tests.pages` writes them, a test compares them."""

import inspect
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import click
from msgspec import Meta
from msgspec.structs import fields

from culm.cli.main import HELP_OPTIONS, culm
from culm.cli.render.json_lines import json_schema as lines_schema
from culm.config.schema import json_schema
from culm.server.openapi import document
from culm.server.routes import BY_NOUN
from culm.settings import Settings
from tests import pages_models, pages_tools

DOCS = Path(__file__).parent.parent / "docs"
SECTIONS = {**pages_models.SECTIONS, **pages_tools.SECTIONS}


def settings_page() -> str:
    rows = [
        f"| `{setting.name}` | {setting.default:.12g} | {_describe(setting.type)} |"
        for setting in fields(Settings)
    ]
    return "\n".join(
        [
            "# Settings",
            "",
            "Generated from `culm.settings.Settings`. `culm serve --config FILE` reads them from a",
            'JSON object, for example `{"linger_s": 600}`; the options of `culm serve` win.',
            "",
            "| setting | default | meaning |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def cli_page() -> str:
    pieces = [
        "# Command line",
        "",
        "Generated from the commands. What people and scripts can rely on is in",
        "[contract/cli.md](contract/cli.md), the lines of `--json` are in",
        "[run-lines.schema.json](run-lines.schema.json). Python programs use the",
        "[client](client.md).",
        "",
    ]
    for context in all_contexts():
        name, command = context.command_path, context.command
        pieces += [f"## `{name}`", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(pieces)


def all_contexts() -> Iterator[click.Context]:
    """Contexts of every command, for a terminal of 80 columns."""
    root = click.Context(culm, info_name="culm", terminal_width=80, help_option_names=HELP_OPTIONS)
    return _contexts(root)


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """The context of a command and of all its subcommands."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.commands:
            command = context.command.get_command(context, name)
            assert command is not None, name
            yield from _contexts(click.Context(command, context, info_name=name))


def _describe(kind: Any) -> str:  # noqa: ANN401 - a type as msgspec hands it out
    assert get_origin(kind) is Annotated
    texts = [m.description for m in get_args(kind)[1:] if isinstance(m, Meta) and m.description]
    return inspect.cleandoc(texts[-1])


def routes_page() -> str:
    pieces = [
        "# Routes",
        "",
        "Generated from the routes; types are in [openapi.json](openapi.json).",
    ]
    for noun, routes in BY_NOUN.items():
        pieces += [
            "",
            f"## {noun.capitalize()}",
            "",
            "| route | body → answer | |",
            "| --- | --- | --- |",
        ]
        for route in routes:
            hints = route.hints()
            body, answer = _type_text(hints.get("body")), _type_text(hints["return"])
            text = " ".join((route.handler.__doc__ or "").split())
            pieces.append(f"| `{route.method} {route.path}` | {body} → {answer} | {text} |")
    return "\n".join([*pieces, ""])


def _type_text(kind: Any) -> str:  # noqa: ANN401 - a type as `get_type_hints` hands it out
    if kind is None or kind is type(None):
        return "–"
    text = re.sub(r"[\w.]+\.", "", str(kind)) if get_args(kind) else kind.__name__
    return f"`{text.replace(' | None', '?').replace('Raw', '')}`".replace("|", "\\|")


def openapi_page() -> str:
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def schema_page() -> str:
    return (
        json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    )  # Like `culm config schema`.


def lines_page() -> str:
    return json.dumps(lines_schema(), indent=2, ensure_ascii=False) + "\n"


_SECTION = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(name: str) -> str:
    """A hand-written page with its generated tables."""

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}{SECTIONS[found[2]]().strip()}\n{found[3]}"

    return _SECTION.sub(made, (DOCS / name).read_text())


PAGES = {
    "settings.md": settings_page,
    "cli.md": cli_page,
    "routes.md": routes_page,
    "openapi.json": openapi_page,
    "culm.schema.json": schema_page,
    "run-lines.schema.json": lines_page,
    "configuration.md": partial(with_tables, "configuration.md"),
    "models.md": partial(with_tables, "models.md"),
    "tools.md": partial(with_tables, "tools.md"),
    "permissions.md": partial(with_tables, "permissions.md"),
    "processes.md": partial(with_tables, "processes.md"),
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
