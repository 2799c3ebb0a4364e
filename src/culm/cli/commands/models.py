"""`culm models`: the usable models, in their order, and the reason why others are not usable.

The list comes from the configuration and from discovery; no model is called.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path

import click
from msgspec import Struct

from culm.cli.config_report import (
    ANY,
    ROLES,
    ConfigReport,
    found_origin,
    models_of,
    read_report,
    show_notices,
    value_at,
    without_credentials,
)
from culm.cli.options import config_options
from culm.cli.render.text import columns, table
from culm.cli.terminal.process import output_width, print_json
from culm.config import jsonc
from culm.config.schema import ProviderFile
from culm.errors import NotFound
from culm.model.catalog import known_providers, vendor_of
from culm.model.choice import ModelConfig, preferred
from culm.model.local_servers import OFF, is_off
from culm.wire.codec import printable
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel


@click.command()
@click.argument("provider", default="")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@config_options
def models(
    provider: str, as_json: bool, directory: Path, config_file: Path | None, data_dir: Path | None
) -> None:
    """Show which models are usable, and why.

    First come the models for large and small tasks, with their fallbacks. Then come all providers
    in order of preference: those of your configuration, keys in the environment, model servers on
    this machine, and `offline`, which is built in. If no model is selected, the first usable
    provider is used. With PROVIDER, show its models with context window in tokens, price and
    abilities.

    Model servers on this machine have 0.3 s to answer. CULM_NO_DISCOVERY=1 turns discovery off.

    \b
    Example:
      culm models
      culm models openai
    """
    report = read_report(directory, config_file, data_dir)
    listing = listing_of(report)
    shown = get_row(listing, provider) if provider else listing
    if as_json:
        print_json(shown)
        return
    show_notices(report)
    width = output_width()
    is_one = isinstance(shown, ProviderRow)
    lines = provider_lines(shown, width) if is_one else listing_lines(shown, width)
    click.echo("\n".join(lines))


class ModelRoleRow(Struct):
    """A model that is chosen for a role."""

    role: str
    provider: str
    model: str
    why: str  # The file that selects it, or the reason why it is the first usable one.
    usable: bool
    reason: str = ""  # Why it is not usable.
    fallback: bool = False


class ProviderRow(Struct):
    """A provider and its models."""

    id: str
    name: str
    type: str
    address: str  # With references as they are written.
    origins: list[str]  # The highest first.
    usable: bool
    reason: str = ""
    models: list[ModelInfo] = []


class ModelListing(Struct):
    """All roles and providers."""

    discovery: bool
    roles: list[ModelRoleRow]
    providers: list[ProviderRow]  # The most preferred first.
    unset: dict[str, str]  # The missing key of each well-known provider without configuration.


def listing_of(report: ConfigReport) -> ModelListing:
    """The roles and providers for a configuration."""
    models = models_of(report)
    order = preferred([layer.document for layer in report.layers])
    rows = [
        _provider_row(report, models, name, models.providers[name])
        for name in order
        if name in models.providers
    ]
    unset = {
        known.id: known.key_env
        for known in known_providers().values()
        if known.id not in models.providers
    }
    return ModelListing(not is_off(report.location.env), list(_roles(report, models)), rows, unset)


def _roles(report: ConfigReport, models: ModelConfig) -> Iterator[ModelRoleRow]:
    def role_of(
        role: str, chosen: SelectedModel, why: str, *, fallback: bool = False
    ) -> ModelRoleRow:
        reason = models.why_not(chosen.provider, chosen.model)
        return ModelRoleRow(role, chosen.provider, chosen.model, why, not reason, reason, fallback)

    for role in ROLES:
        fallbacks = models.fallbacks.get(role, [])
        chosen = models.selected(role)
        if chosen != SelectedModel():
            yield role_of(role, chosen, _chosen_by(report, ("models", role), chosen.provider))
        elif not fallbacks and role == "small" and (chosen := models.choose(role)) is not None:
            yield role_of(role, chosen, "same as large")
        for chosen in fallbacks:
            why = _chosen_by(report, ("fallbacks", role), chosen.provider)
            yield role_of(role, chosen, why, fallback=True)


def _chosen_by(report: ConfigReport, path: jsonc.Path, provider_id: str) -> str:
    """The highest file that selects the model, else the origin of its provider."""
    for layer in reversed(report.layers):
        if value_at(layer.document, path):
            return f"selected in {layer.name}"
    return next(iter(_origins(report, provider_id)), "")


def _provider_row(
    report: ConfigReport, models: ModelConfig, provider_id: str, provider: ProviderFile
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
        list(_origins(report, provider_id)),
        not reason,
        reason,
        [models.info(SelectedModel(model=one, provider=provider_id)) for one in ids],
    )


def _known_ids(provider_id: str, address: str) -> list[str]:
    """Models to offer where the configuration lists none."""
    known = known_providers().get(vendor_of(provider_id, address))
    return [] if known is None else [model.id for model in known.models]


def _origins(report: ConfigReport, provider_id: str) -> Iterator[str]:
    """The origins of a provider, the highest first."""
    first, *others = report.layers
    for layer in reversed(others):
        if value_at(layer.document, ("providers", provider_id)) is not None:
            yield layer.name
    if value_at(first.document, ("providers", provider_id)) is not None:
        yield found_origin(provider_id, report.found)


def _unset_row(provider_id: str, *, discovery: bool) -> ProviderRow | None:
    """A well-known provider that is not configured."""
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
    """One provider; raises `NotFound` with the nearest."""
    rows = {row.id: row for row in listing.providers}
    row = rows.get(provider_id) or _unset_row(provider_id, discovery=listing.discovery)
    if row is not None:
        return row
    names = [*rows, *listing.unset]
    close = difflib.get_close_matches(provider_id.lower(), names, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
    raise NotFound(f"unknown provider {provider_id!r}", hint=printable(hint))


# --- as text


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
    lines = columns(roles, width=width) or ["No model is usable."]
    lines += ["", "Providers, the most preferred first:", *columns(providers, "  ", width)]
    if not listing.discovery:
        lines += ["", f"{OFF} is set: keys in the environment and local servers are not used."]
    elif listing.unset:
        lines += ["", "Also known; each needs its key in the environment:"]
        lines += columns(listing.unset.items(), "  ", width)
    return lines


def provider_lines(row: ProviderRow, width: int = 0) -> list[str]:
    # The reason is shown in full, so this part may wrap.
    about = [
        ("provider", f"{row.id} ({row.name})"),
        ("type", row.type),
        ("address", row.address),
        ("from", ", ".join(row.origins)),
        ("state", _state(row)),
    ]
    lines = columns([one for one in about if one[1]])
    if not row.models:
        return [*lines, "", "It lists no models; any model name can be used."]
    head = ("model", "context", "USD per 1M in", "out", "abilities")
    return [*lines, "", *table(head, map(_model_cells, row.models), width)]


def _state(row: ProviderRow) -> str:
    return "usable" if row.usable else f"not usable: {row.reason}"


def _model_cells(model: ModelInfo) -> tuple[str, ...]:
    """The cells of a model; an unknown value is a dash."""
    abilities = {"reasons": model.can_reason, "sees images": model.supports_attachments}
    return (
        model.id,
        f"{model.context_window:,}" if model.context_window else "-",
        f"{model.cost_per_1m_in:g}" if model.cost_per_1m_in else "-",
        f"{model.cost_per_1m_out:g}" if model.cost_per_1m_out else "-",
        ", ".join(name for name, has in abilities.items() if has) or "-",
    )
