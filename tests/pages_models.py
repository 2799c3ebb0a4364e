"""The tables of keys, providers and types in the pages about models and configuration."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct, UnsetType

from culm.config.schema import AgentRole, Hook, OwnTool, ProjectFile, ProviderFile
from culm.model.catalog import BUILT_IN, known_providers
from culm.model.local_servers import LOCAL_SERVERS
from culm.wire.asks import Rule
from culm.wire.config import Model, Options, SelectedModel, TuiOptions

Hint = Any  # The type in an annotation.

_KINDS: tuple[tuple[str, type[Struct]], ...] = (
    ("culm.json", ProjectFile),
    ("a provider, in `providers.<id>`", ProviderFile),
    ("a selected model, in `models` and `fallbacks`", SelectedModel),
    ("a model, in `providers.<id>.models`", Model),
    ("`options`", Options),
    ("`options.tui`", TuiOptions),
    ("a rule, in `permission_rules`", Rule),
    ("a hook, in `hooks.PreToolUse`", Hook),
    ("a tool, in `own_tools.<name>`", OwnTool),
    ("a role, in `roles.<name>`", AgentRole),
)
_MODELS = {"_openai": "OpenAI's chat completions", "_anthropic": "Anthropic's messages"}


def keys() -> str:
    return "\n".join(line for title, kind in _KINDS for line in _table(title, kind))


def _table(title: str, kind: type[Struct]) -> Iterator[str]:
    yield from (f"| {title} | | |", "| --- | --- | --- |")
    names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    hints = get_type_hints(kind, include_extras=True)
    for name, key in names.items():
        text = _description(hints[name]) or "Reserved."
        yield f"| `{key}` | {_kind_of(hints[name])} | {text} |"
    yield ""


def _description(hint: Hint) -> str:
    texts = [one.description for one in get_args(hint)[1:] if isinstance(one, Meta)]
    return next((text for text in texts if text), "") if get_origin(hint) is Annotated else ""


def _kind_of(hint: Hint) -> str:
    if get_origin(hint) is Annotated:
        return _kind_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return _kind_of(next(one for one in get_args(hint) if one is not UnsetType))
    if get_origin(hint) is list:
        return "list"
    if get_origin(hint) is Literal:
        return "text"
    kinds = {str: "text", bool: "true or false", int: "whole number", float: "number"}
    return cast("dict[Hint, str]", kinds).get(hint, "object")


def providers() -> str:
    rows = [
        "| key variable | provider | large | small | URL variable |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| `{one.key_env}` | {one.name} (`{one.id}`) | `{one.large}` | `{one.small}` "
        f"| `{one.url_env}` |"
        for one in known_providers().values()
    ]
    return "\n".join(rows)


def local() -> str:
    rows = ["| server | id | default address | override variable |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {one.name} | `{one.id}` | `127.0.0.1:{one.port}` | `{one.url_env}` |"
        for one in LOCAL_SERVERS
    ]
    return "\n".join(rows)


def types() -> str:
    rows = ["| `type` | API | default URL | needs a key |", "| --- | --- | --- | --- |"]
    for name, dialect in BUILT_IN.items():
        api = _MODELS.get(getattr(dialect.make, "__name__", ""), "none: rules, not an LLM")
        where = f"`{dialect.base_url}`" if dialect.base_url else "–"
        rows.append(f"| `{name}` | {api} | {where} | {'yes' if dialect.needs_key else 'no'} |")
    return "\n".join(rows)


SECTIONS = {"keys": keys, "providers": providers, "local": local, "types": types}
