"""Rules by which calls are allowed, asked about or denied, as people and callers write them.

What a rule matches is `permission/policy.py`. A name that no rule has is an error here, unlike on
the rest of the wire: whoever writes `comand` must not have allowed every command.
"""

from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta, Struct

from culm.errors import InvalidRequest
from culm.wire.codec import Json

RULES_MAX = 500  # Of one configuration or one run; people write a dozen.
PATTERN_CHARS_MAX = 1000

Decision = Literal["allow", "ask", "deny"]
Pattern = Annotated[str, Meta(max_length=PATTERN_CHARS_MAX)]


class Rule(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    decision: Annotated[Decision, Meta(description="`allow`, `ask` or `deny`.")]
    tool: Annotated[Pattern, Meta(description="Its name; `*` and `?` stand for others.")] = "*"
    action: Annotated[
        Pattern, Meta(description="What it does: `execute`, `write`, `read`, `fetch`, …")
    ] = "*"
    path: Annotated[
        Pattern, Meta(description="A glob of files, from the workspace, `/` or `~/`.")
    ] = ""
    command: Annotated[
        Pattern, Meta(description="Words of a command; a `*` alone is any number of words.")
    ] = ""


# What decides instead of a person: given with a prompt, kept on its run.
Approve = Literal["ask", "allow", "deny"] | tuple[Rule, ...]


def parse_rules(value: Json) -> tuple[Rule, ...]:
    """Read a list of rules; raises `InvalidRequest` naming the one that is wrong."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("a list of rules is wanted")
    items = cast("list[Json]", value)
    if len(items) > RULES_MAX:
        raise InvalidRequest(f"too many rules: at most {RULES_MAX}")
    return tuple(_parse_rule(number, item) for number, item in enumerate(items))


def _parse_rule(number: int, item: Json) -> Rule:
    if isinstance(item, dict):  # Null says nothing, as everywhere.
        fields = cast("dict[str, Json]", item)
        item = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(item, Rule)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"rule {number + 1} is wrong: {exc}") from exc


def parse_approve(value: Json) -> Approve | None:
    """Read the `approve` of a prompt; raises `InvalidRequest`."""
    if value is None or value == "":
        return None
    if value in ("ask", "allow", "deny"):
        return value
    if not isinstance(value, list):
        raise InvalidRequest("approve must be ask, allow, deny or a list of rules")
    return parse_rules(cast("Json", value))
