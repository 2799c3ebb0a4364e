"""Agents that are announced in the discovery directory, and the one with a given name."""

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from culm.cli.render.tables import table
from culm.cli.terminal.streams import output_width
from culm.clock import LoopClock
from culm.errors import NotFound
from culm.fleet.discovery.base import AgentRecord, Discovery
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.names import is_safe_name
from culm.wire.codec import printable

SHOWN_MAX = 5  # Agents in a hint.


def discovery_of(data_dir: Path) -> FileDiscovery:
    return FileDiscovery(discovery_dir_of(data_dir), LoopClock())


def discovery_dir_of(data_dir: Path) -> Path:
    return data_dir / "fabric"


def show_agents(discovery: Discovery, role: str, label: str, *, as_json: bool) -> None:
    found = [one for one in discovery.discover(role=role, label=label) if _takes_calls(one)]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    elif found:
        head = ("agent", "role", "pid", "labels", "endpoint")
        click.echo("\n".join(table(head, map(_row, found), output_width())))
    else:
        click.echo(
            "no matching agent is running" if role or label else "no agent is running", err=True
        )


def _takes_calls(record: AgentRecord) -> bool:
    """Return False for a worker that a process owns: it serves that process alone."""
    return record.culm is None or record.culm.owner is None


def _row(record: AgentRecord) -> Sequence[str]:
    labels = ", ".join(record.labels) or "-"
    return record.agent_id, record.role or "-", str(record.pid), labels, record.endpoint


def get_agent(discovery: Discovery, name: str) -> AgentRecord:
    """The agent with this id, or the first with this role; raises `NotFound` with known ones."""
    found = discovery.resolve(name) if is_safe_name(name) else None
    if found is not None:
        return found
    known = [one for one in discovery.discover() if _takes_calls(one)]
    of_role = [record for record in known if name and record.role == name]
    if of_role:
        return of_role[0]
    shown = [f"{one.agent_id} ({one.role or 'no role'})" for one in known[:SHOWN_MAX]]
    if len(known) > SHOWN_MAX:
        shown.append(f"{len(known) - SHOWN_MAX} more")
    hint = f"running: {', '.join(shown)}" if shown else f"start one: culm agent serve --role {name}"
    raise NotFound(f"no agent has the id or role {printable(name)}", hint=printable(hint))
