"""One document of all that configures a workspace, in which a large model is named. Pure."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import cast

from culm.config.checking import Document
from culm.config.layers import provider_ids, without_strayed_keys
from culm.config.references import Variables
from culm.config.schema import ProviderFile
from culm.config.sources import LoadedConfig
from culm.model.catalog import find_provider
from culm.model.choice import check_models, why_unusable
from culm.model.local_servers import FoundProviders
from culm.wire.config import SelectedModel

USER_LAYER, WORKSPACE_LAYER = 2, -1  # The documents that clients change, among `layers_of`.


def layers_of(
    found: FoundProviders, loaded: LoadedConfig, user: Document, workspace: Document
) -> list[Document]:
    """All that configures a workspace, the later over the earlier.

    What was found without anybody's doing, the user's file, the user's document, the project's
    files, the workspace's document.
    """
    return [found.document, loaded.user, user, *loaded.project, workspace]


def merged_config(layers: Sequence[Document], env: Mapping[str, str]) -> Document:
    """One document, keys included, which names a large model if there is any.

    No key goes to an address that came after it.
    """
    # What was found in the user's environment and the user's own file are one person's.
    whole = without_strayed_keys(layers, own=USER_LAYER)
    return with_defaults(whole, preferred(layers), env)


def preferred(layers: Sequence[Document]) -> list[str]:
    """The providers there are, the most preferred first: configured ones before found ones."""
    found, *configured = (provider_ids(layer) for layer in layers)
    return list(dict.fromkeys([*chain.from_iterable(configured), *found]))


def with_defaults(document: Document, order: Sequence[str], env: Mapping[str, str]) -> Document:
    """The document, with a large and a small model selected if it selects none.

    They are those of the first provider in `order` that can be used.
    """
    config = check_models(document)
    if config.models.get("large", SelectedModel()) != SelectedModel():
        return dict(document)
    variables = Variables(config.env, env)
    for provider_id in order:
        provider = config.providers.get(provider_id)
        if provider is None or why_unusable(provider_id, provider, variables):
            continue
        large, small = _default_models(provider_id, provider)
        if large:
            chosen = {
                "large": {"model": large, "provider": provider_id},
                "small": {"model": small, "provider": provider_id},
            }
            models = cast("Document", document.get("models") or {})
            return {**document, "models": {**chosen, **models}}
    return dict(document)


def _default_models(provider_id: str, provider: ProviderFile) -> tuple[str, str]:
    listed = [model.id for model in provider.models if model.id]
    known = find_provider(provider_id)
    if known is not None and (not listed or {known.large, known.small} <= set(listed)):
        return known.large, known.small
    return (listed[0], listed[0]) if listed else ("", "")
