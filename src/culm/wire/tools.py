"""Tools as clients see them: which arguments matter, and how a call is displayed.

A tool declares these facts once, on its `ToolSpec`; clients and rules need no tables by tool name.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

ToolKind = Literal["read", "edit", "execute", "fetch", "agent", "other"]


class ToolFacts(Struct, frozen=True, kw_only=True):
    """Facts about a tool that a model does not need."""

    kind: Annotated[
        ToolKind,
        Meta(
            description="`read` (files or other state), `edit` (changes files), `execute` (runs "
            "or ends processes), `fetch` (uses the network), `agent` (other agents work for it, "
            "and report themselves) or `other`."
        ),
    ] = "other"
    path_arguments: Annotated[
        tuple[str, ...], Meta(description="The arguments that are paths, the main one first.")
    ] = ()
    command_argument: Annotated[
        str, Meta(description="The argument that is a shell command; empty if there is none.")
    ] = ""
    shown_arguments: Annotated[
        tuple[str, ...],
        Meta(description="The arguments that identify a call, in the order of display."),
    ] = ()

    @property
    def subject(self) -> tuple[str, ...]:
        """The arguments that the pattern of a rule matches: the command, or else the paths."""
        return (self.command_argument,) if self.command_argument else self.path_arguments


class ToolInfo(ToolFacts, frozen=True, kw_only=True):
    """A tool of a workspace."""

    name: str
    enabled: bool = True  # False if the configuration disables it.
