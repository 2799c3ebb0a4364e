"""One configuration of several documents, the later ones laid over the earlier. Pure."""

from collections.abc import Iterable, Sequence
from typing import cast

from culm.config.checking import Document
from culm.config.references import names_in
from culm.wire.codec import Json, folded

_SECRETS = ("api_key", "oauth")
_SECRET_MAPS = ("extra_headers", "extra_body", "provider_options")
# Lists to which every layer adds, by how deep they stand and where: nobody's rule or hook is lost
# because somebody else has one.
_JOINED = frozenset({(0, "permission_rules"), (1, "hooks")})


def merged(documents: Iterable[Document]) -> Document:
    """One document of several, the later ones laid over the earlier."""
    result: Document = {}
    for document in documents:
        result = _merged(result, document, 0)
    return result


def _merged(under: Document, over: Document, depth: int, inside: str = "") -> Document:
    """`inside` is the name that this part of the documents has at their top."""
    result = dict(under)
    for name, value in over.items():
        known, top = result.get(name), inside or folded(name)
        if value is None:
            continue  # It says nothing, as Go reads it.
        if isinstance(value, dict):
            below = cast("Document", known) if isinstance(known, dict) else {}
            fields = cast("Document", value)
            if depth == 1 and inside == "models":
                below = _left_of_selection(below, fields)
            elif depth == 1 and inside in ("own_tools", "roles"):
                below = {}  # One of them is not made of two.
            result[name] = _merged(below, fields, depth + 1, top)
        elif isinstance(value, list) and isinstance(known, list) and (depth, top) in _JOINED:
            result[name] = [*cast("list[Json]", known), *cast("list[Json]", value)]
        else:
            result[name] = value
    return result


def _left_of_selection(below: Document, over: Document) -> Document:
    """What stays of a selected model under another selection: of another model, not how it is
    asked."""
    for name in ("provider", "model"):
        said = spelled(over, name)
        if said and said[-1:] != spelled(below, name)[-1:]:
            whose = {} if spelled(over, "provider") else below
            return {field: value for field, value in whose.items() if folded(field) == "provider"}
    return below


def provider_ids(document: Document) -> list[str]:
    """The providers that a document says something about, in its order."""
    return [
        name
        for providers in spelled(document, "providers")
        if isinstance(providers, dict)
        for name in cast("Document", providers)
    ]


def without_strayed_keys(layers: Sequence[Document], *, own: int = 1) -> Document:
    """The layers merged, without what a provider's owner meant for another address.

    Whoever may set an address could otherwise have a key sent there that no route shows. The
    lowest `own` layers are one person's, who may say the one here and the other there.
    """
    ranked = [merged(layers[:own]), *layers[own:]]
    whole = merged(ranked)
    return {
        key: _kept(ranked, cast("Document", value), _env(whole))
        if folded(key) == "providers" and isinstance(value, dict)
        else value
        for key, value in whole.items()
    }


def _kept(layers: Sequence[Document], providers: Document, variables: Document) -> Document:
    kept: Document = {}
    for name, provider in providers.items():
        address = _address_layer(layers, name, variables)
        if isinstance(provider, dict):
            fields = cast("Document", provider)
            provider = {
                field: _followers(layers, name, field, value, address)
                for field, value in fields.items()
                if folded(field) not in _SECRETS or _last_layer(layers, name, field)[0] >= address
            }
        kept[name] = provider
    return kept


def _followers(
    layers: Sequence[Document], provider: str, field: str, value: Json, address: int
) -> Json:
    """Of headers and the like, those that were written for this address or after it."""
    if folded(field) not in _SECRET_MAPS or not isinstance(value, dict):
        return value
    said: dict[str, int] = {}
    for n, layer in enumerate(layers):
        entries = _last_layer([layer], provider, field)[1]
        said |= dict.fromkeys(cast("Document", entries), n) if isinstance(entries, dict) else {}
    entries = cast("Document", value)
    return {name: inner for name, inner in entries.items() if said.get(name, -1) >= address}


def _address_layer(layers: Sequence[Document], provider: str, variables: Document) -> int:
    """The highest layer that has a say in where a provider is, or -1."""
    layer, address = _last_layer(layers, provider, "base_url")
    if layer < 0:  # It is where its type says.
        return _last_layer(layers, provider, "type")[0]
    names = _names_behind(address, variables) if isinstance(address, str) else ()
    setting = [n for n, one in enumerate(layers) if any(name in _env(one) for name in names)]
    return max(layer, *setting) if setting else layer


def _names_behind(text: str, variables: Document) -> set[str]:
    """The variables a text refers to, itself or by way of others."""
    names = names_in(text)
    while more := {n for name in names for n in names_in(str(variables.get(name, "")))} - names:
        names |= more
    return names


def _env(layer: Document) -> Document:
    """The variables that a layer sets."""
    return {
        name: value
        for env in spelled(layer, "env")
        if isinstance(env, dict)
        for name, value in cast("Document", env).items()
    }


def _last_layer(layers: Sequence[Document], provider: str, field: str) -> tuple[int, Json]:
    """The highest layer that says something about a field of a provider, and what; or -1."""
    found: tuple[int, Json] = (-1, None)
    for n, layer in enumerate(layers):
        for providers in spelled(layer, "providers"):
            known = cast("Document", providers) if isinstance(providers, dict) else {}
            fields = known.get(provider)
            for value in spelled(cast("Document", fields), folded(field)) if fields else ():
                found = (n, value)
    return found


def spelled(document: Document, name: str) -> list[Json]:
    """All values under a name, however it is spelled; null says nothing."""
    return [value for key, value in document.items() if folded(key) == name and value is not None]
