"""What `culm config check` finds: every problem with its file, line and key. Pure."""

import difflib
from collections.abc import Iterator
from typing import NamedTuple, cast

from culm.cli.models import ANY, ROLES, models_of
from culm.cli.reading import ConfigLayer, ConfigReport, untrusted_parts, value_at
from culm.config import jsonc
from culm.config.checking import ConfigProblem, Document, key_of
from culm.config.references import Variables, why_unresolved
from culm.model.catalog import known_providers
from culm.model.choice import Models, check_models
from culm.model.local_servers import LOCAL_SERVERS, OFF, is_off
from culm.wire.codec import Json, strings_in

UNSET_HINT = "set the variable, write `${NAME:-default}`, or set the key to something else"


class ConfigFinding(NamedTuple):
    problem: ConfigProblem
    is_note: bool = False  # Worth knowing; nothing need be mended.


def findings_of(reading: ConfigReport) -> list[ConfigFinding]:
    """Everything, in the order of the files and their lines."""
    models = models_of(reading)
    found = [
        *_in_texts(reading),
        *_untrusted(reading),
        *_references(reading),
        *_selections(reading, models),
    ]
    named = {finding.problem.key for finding in found}
    found += _providers(reading, models, named)
    order = [layer.name for layer in reading.layers]
    order += [str(read.source.file) for read in reading.reads]
    unique = dict.fromkeys(found)
    return sorted(unique, key=lambda one: (order.index(one.problem.file), one.problem.line))


def _in_texts(reading: ConfigReport) -> Iterator[ConfigFinding]:
    """What does not fit the schema.

    Of another program's file, and of what clients set, the part that we know counts.
    """
    for read in reading.reads:
        for problem in read.checked.problems:
            yield ConfigFinding(problem, is_note=not read.is_bad)
    for read in reading.documents:
        for problem in read.checked.problems:
            yield ConfigFinding(problem, is_note=read.checked.is_json)


def _untrusted(reading: ConfigReport) -> Iterator[ConfigFinding]:
    for read, ignored in untrusted_parts(reading):
        keys = ", ".join(sorted(key_of(path) for path, _ in ignored))
        what = f"it is not trusted, so this part of it is ignored: {keys}"
        hint = "read it, then say: culm trust"
        yield ConfigFinding(ConfigProblem(str(read.source.file), 0, "", what, hint), is_note=True)


# --- references


def _references(reading: ConfigReport) -> Iterator[ConfigFinding]:
    """Those that lead nowhere, as far as they count; no command is run."""
    whole = reading.whole
    variables = Variables(check_models(whole).env, reading.location.env)
    for layer in reading.layers:
        if layer.read is None:
            continue
        for path, text in strings_in(cast("Json", layer.document)):
            if not _is_resolved(path, whole) or value_at(whole, path) != text:
                continue
            # By its name, so that one which leads to itself is seen to.
            name = str(path[-1])
            is_variable = path[0] == "env" and name.isascii() and name.isidentifier()
            asked = f"${name}" if is_variable else text
            if reason := why_unresolved(asked, variables):
                yield ConfigFinding(layer.problem(path, key_of(path), reason, _hint_for(reason)))


def _is_resolved(path: jsonc.Path, whole: Document) -> bool:
    """Whether references are read at this path."""
    match path:
        case ("env", _):
            return True
        case ("providers", name, "api_key" | "base_url") | (
            "providers",
            name,
            "extra_headers",
            _,
        ):
            return not value_at(whole, ("providers", name, "disable"))
        case _:
            return False


def _hint_for(reason: str) -> str:
    return UNSET_HINT if reason.endswith("is not set") else ""


# --- models and providers


def _selections(reading: ConfigReport, models: Models) -> Iterator[ConfigFinding]:
    """Models that are selected and cannot be had."""
    for layer in reading.layers:
        if layer.read is None:
            continue
        for path in _selected(layer):
            chosen = value_at(layer.document, path)
            if not isinstance(chosen, dict) or value_at(reading.whole, path) != chosen:
                continue
            fields = cast("Document", chosen)
            provider, model = str(fields.get("provider", "")), str(fields.get("model", ""))
            if not provider and not model:
                continue  # As if nothing were said.
            if value_at(reading.whole, ("providers", provider)) is None:
                reason = models.why_not(provider, model)
                place = (*path, "provider")
                hint = _nearest_provider(reading, provider)
                yield ConfigFinding(layer.problem(place, key_of(place), reason, hint))
            elif not model:
                yield ConfigFinding(layer.problem(path, key_of(path), "no model is named"))
            else:
                yield from _misspelled(reading, layer, (*path, "model"), provider, model)


def _selected(layer: ConfigLayer) -> Iterator[jsonc.Path]:
    for role in ROLES:
        yield "models", role
        others = value_at(layer.document, ("fallbacks", role))
        for n in range(len(cast("list[Json]", others)) if isinstance(others, list) else 0):
            yield "fallbacks", role, n


def _nearest_provider(reading: ConfigReport, provider: str) -> str:
    known = known_providers()
    locals_ = [server.id for server in LOCAL_SERVERS]
    if is_off(reading.location.env) and (provider in known or provider in locals_):
        return f"{OFF} is set, so nothing is looked for"
    if provider in known:
        return f"set {known[provider].key_env}, or write providers.{provider}.api_key"
    if provider in locals_:
        return "no such server answers on this machine; start it"
    there = check_models(reading.whole).providers
    close = difflib.get_close_matches(provider.lower(), [*there, *known, *locals_], 1)
    return f"did you mean {close[0]!r}?" if close else f"there is {', '.join(there)}"


def _misspelled(
    reading: ConfigReport, layer: ConfigLayer, path: jsonc.Path, provider: str, model: str
) -> Iterator[ConfigFinding]:
    """A model that its provider does not list may be there all the same."""
    listed = [one.id for one in check_models(reading.whole).providers[provider].models]
    close = difflib.get_close_matches(model, listed, 1, 0.8)
    if listed and model not in listed and close:
        what = f"provider {provider!r} lists no model {model!r}"
        hint = f"did you mean {close[0]!r}?"
        yield ConfigFinding(layer.problem(path, key_of(path), what, hint), is_note=True)


def _providers(reading: ConfigReport, models: Models, named: set[str]) -> Iterator[ConfigFinding]:
    """Providers that somebody wrote down and that cannot be used as they are."""
    for name, provider in check_models(reading.whole).providers.items():
        key = key_of(("providers", name))
        reason = "" if provider.disable else models.why_not(name, ANY)
        if not reason or any(one.startswith(f"{key}.") for one in named):
            continue
        path = ("providers", name)
        writers = [
            layer
            for layer in reading.layers
            if layer.read is not None and value_at(layer.document, path) is not None
        ]
        if writers:
            yield ConfigFinding(writers[-1].problem(path, key, reason))
