"""`culm models`: which models can be used here, in which order, and why not the others.

What is shown comes from the configuration and from what was found; no model is asked.
"""

import difflib
from collections.abc import Iterator
from typing import NoReturn

import click
import msgspec
from msgspec import Struct

from culm.cli.reading import ConfigReport, found_origin, value_at
from culm.cli.render.text import columns, table
from culm.cli.secrets import without_credentials
from culm.cli.terminal.streams import output_width
from culm.config import jsonc
from culm.config.references import UnresolvedReference
from culm.config.schema import ProviderFile
from culm.errors import NotFound
from culm.model.base import LanguageModel
from culm.model.catalog import known_providers, vendor_of
from culm.model.choice import ChosenModel, ModelConfig, Models, check_models
from culm.model.local_servers import OFF, is_off
from culm.model.merge import preferred
from culm.wire.codec import printable
from culm.wire.config import Model as ModelInfo
from culm.wire.config import ModelType, SelectedModel

ANY = "any"  # Stands for a model where only its provider matters.
ROLES: tuple[ModelType, ...] = ("large", "small")


class ModelRoleRow(Struct):
    """A model that was chosen for a kind of work."""

    role: str
    provider: str
    model: str
    why: str  # Who chose it, or what made it the first that can be used.
    usable: bool
    reason: str = ""  # Why it cannot be used.
    fallback: bool = False


class ProviderRow(Struct):
    """One provider and its models."""

    id: str
    name: str
    type: str
    address: str  # References stay as they are written.
    origins: list[str]  # Where it comes from, the highest first.
    usable: bool
    reason: str = ""
    models: list[ModelInfo] = []


class ModelListing(Struct):
    """All that can be used here."""

    discovery: bool
    roles: list[ModelRoleRow]
    providers: list[ProviderRow]  # The most preferred first.
    unset: dict[str, str]  # Well-known providers that nobody configured: the key each needs.


def models_of(reading: ConfigReport) -> Models:
    """The choices a server would make here; none of the models can be asked."""
    present = ModelConfig(reading.whole, reading.location.env)
    return Models(lambda: present, _make_none, _run_none)


def _make_none(_: ChosenModel) -> LanguageModel:
    raise AssertionError("nobody asks a model here")


async def _run_none(_: str) -> NoReturn:
    raise UnresolvedReference("no command is run here")


def listing_of(reading: ConfigReport) -> ModelListing:
    """What can be used, and why."""
    config = check_models(reading.whole)
    models = models_of(reading)
    order = preferred([layer.document for layer in reading.layers])
    rows = [
        _provider_row(reading, models, name, config.providers[name])
        for name in order
        if name in config.providers
    ]
    unset = {
        known.id: known.key_env
        for known in known_providers().values()
        if known.id not in config.providers
    }
    return ModelListing(
        not is_off(reading.location.env), list(_roles(reading, models)), rows, unset
    )


def _roles(reading: ConfigReport, models: Models) -> Iterator[ModelRoleRow]:
    config = check_models(reading.whole)

    def role_of(
        role: str, chosen: SelectedModel, why: str, *, fallback: bool = False
    ) -> ModelRoleRow:
        reason = models.why_not(chosen.provider, chosen.model)
        return ModelRoleRow(role, chosen.provider, chosen.model, why, not reason, reason, fallback)

    for role in ROLES:
        fallbacks = config.fallbacks.get(role, [])
        chosen = models.selected(role)
        if chosen != SelectedModel():
            yield role_of(role, chosen, _chosen_by(reading, ("models", role), chosen.provider))
        elif not fallbacks and role == "small" and (chosen := models.choose(role)) is not None:
            yield role_of(role, chosen, "does large work, too")
        for chosen in fallbacks:
            why = _chosen_by(reading, ("fallbacks", role), chosen.provider)
            yield role_of(role, chosen, why, fallback=True)


def _chosen_by(reading: ConfigReport, path: jsonc.Path, provider_id: str) -> str:
    """The highest file that names it; else where its provider comes from."""
    for layer in reversed(reading.layers):
        if value_at(layer.document, path):
            return f"selected in {layer.name}"
    return next(iter(_origins(reading, provider_id)), "")


def _provider_row(
    reading: ConfigReport, models: Models, provider_id: str, provider: ProviderFile
) -> ProviderRow:
    reason = models.why_not(provider_id, ANY)
    known = known_providers().get(provider_id)
    address, type_ = provider.base_url, provider.type
    if not reason:
        access = models.get(provider_id, ANY).access
        address, type_ = access.base_url, access.type
    name = provider.name or (known.name if known is not None else provider_id)
    ids = [model.id for model in provider.models if model.id] or _known_ids(provider_id, address)
    return ProviderRow(
        provider_id,
        name,
        type_,
        without_credentials(address),
        list(_origins(reading, provider_id)),
        not reason,
        reason,
        [models.info(SelectedModel(model=one, provider=provider_id)) for one in ids],
    )


def _known_ids(provider_id: str, address: str) -> list[str]:
    """The models to offer where the configuration lists none."""
    known = known_providers().get(vendor_of(provider_id, address))
    return [] if known is None else [model.id for model in known.models]


def _origins(reading: ConfigReport, provider_id: str) -> Iterator[str]:
    """Where a provider comes from, the highest first."""
    first, *others = reading.layers
    for layer in reversed(others):
        if value_at(layer.document, ("providers", provider_id)) is not None:
            yield layer.name
    if value_at(first.document, ("providers", provider_id)) is not None:
        yield found_origin(provider_id, reading.found)


def _unset_row(provider_id: str, *, discovery: bool) -> ProviderRow | None:
    """A well-known provider that nobody configured."""
    known = known_providers().get(provider_id)
    if known is None:
        return None
    unset = f"{known.key_env} is not set"
    return ProviderRow(
        known.id,
        known.name,
        known.type,
        known.base_url,
        [],
        usable=False,
        reason=unset if discovery else f"{OFF} is set, and it is not configured",
        models=list(known.models),
    )


def get_row(listing: ModelListing, provider_id: str) -> ProviderRow:
    """One provider; raises `NotFound`, which offers the nearest."""
    rows = {row.id: row for row in listing.providers}
    row = rows.get(provider_id) or _unset_row(provider_id, discovery=listing.discovery)
    if row is not None:
        return row
    names = [*rows, *listing.unset]
    close = difflib.get_close_matches(provider_id.lower(), names, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(names)}"
    raise NotFound(f"there is no provider {provider_id!r}", hint=printable(hint))


# --- as text


def show_models(reading: ConfigReport, provider_id: str, *, as_json: bool) -> None:
    """Print what can be used; of one provider, all that is known of its models."""
    listing = listing_of(reading)
    shown = get_row(listing, provider_id) if provider_id else listing
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
        return
    for notice in reading.notices:
        click.echo(f"note: {printable(notice)}", err=True)
    width = output_width()
    is_one = isinstance(shown, ProviderRow)
    lines = provider_lines(shown, width) if is_one else listing_lines(shown, width)
    click.echo("\n".join(lines))


def listing_lines(listing: ModelListing, width: int = 0) -> list[str]:
    roles = [
        (
            "  or" if role.fallback else role.role,
            f"{role.provider}/{role.model}",
            f"({role.why})" if role.usable else f"({role.why}) not usable: {role.reason}",
        )
        for role in listing.roles
    ]
    providers = [(row.id, ", ".join(row.origins), _state(row)) for row in listing.providers]
    lines = columns(roles, width=width) or ["No model can be used."]
    lines += ["", "Providers, the most preferred first:", *columns(providers, "  ", width)]
    if not listing.discovery:
        lines += ["", f"{OFF} is set: neither keys in the environment nor local servers count."]
    elif listing.unset:
        lines += ["", "Also known; each needs its key in the environment:"]
        lines += columns(listing.unset.items(), "  ", width)
    return lines


def provider_lines(row: ProviderRow, width: int = 0) -> list[str]:
    # Why it cannot be used is read here in full, so this part may wrap.
    about = [
        ("provider", f"{row.id} ({row.name})"),
        ("type", row.type),
        ("address", row.address),
        ("from", ", ".join(row.origins)),
        ("state", _state(row)),
    ]
    lines = columns([one for one in about if one[1]])
    if not row.models:
        return [*lines, "", "It lists no models; any name can be asked for."]
    head = ("model", "context", "USD per 1M in", "out", "abilities")
    return [*lines, "", *table(head, map(_model_cells, row.models), width)]


def _state(row: ProviderRow) -> str:
    return "usable" if row.usable else f"not usable: {row.reason}"


def _model_cells(model: ModelInfo) -> tuple[str, ...]:
    """What is not known is a dash."""
    abilities = {"reasons": model.can_reason, "sees images": model.supports_attachments}
    return (
        model.id,
        f"{model.context_window:,}" if model.context_window else "-",
        f"{model.cost_per_1m_in:g}" if model.cost_per_1m_in else "-",
        f"{model.cost_per_1m_out:g}" if model.cost_per_1m_out else "-",
        ", ".join(name for name, has in abilities.items() if has) or "-",
    )
