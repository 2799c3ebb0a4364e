"""Permission rules (allow, ask, deny) as people and API clients write them.

`permission/policy.py` matches them. Unlike elsewhere on the wire, an unknown field is an error:
a rule with the typo `comand` must not allow every command.
"""

from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta, Struct

from culm.errors import InvalidRequest
from culm.wire.codec import Json

RULES_MAX = 500  # In one configuration or one run; people write a dozen.
PATTERN_CHARS_MAX = 1000

Decision = Literal["allow", "ask", "deny"]
Pattern = Annotated[str, Meta(max_length=PATTERN_CHARS_MAX)]


class Rule(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    decision: Annotated[Decision, Meta(description="`allow`, `ask` or `deny`.")]
    tool: Annotated[Pattern, Meta(description="The name of a tool; `*` and `?` are wildcards.")] = (
        "*"
    )
    action: Annotated[
        Pattern, Meta(description="The action: `execute`, `write`, `read`, `fetch`, …")
    ] = "*"
    path: Annotated[
        Pattern,
        Meta(description="A glob for files, relative to the workspace or from `/` or `~/`."),
    ] = ""
    command: Annotated[
        Pattern,
        Meta(description="A command and its arguments; a separate `*` is any number of them."),
    ] = ""


# Decides instead of a person. It is sent with a prompt and stored with its run.
Approve = Literal["ask", "allow", "deny"] | tuple[Rule, ...]


def parse_rules(value: Json) -> tuple[Rule, ...]:
    """Parse a list of rules; raises `InvalidRequest` with the number of the invalid rule."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("rules must be a list")
    items = cast("list[Json]", value)
    if len(items) > RULES_MAX:
        raise InvalidRequest(f"too many rules: at most {RULES_MAX}")
    return tuple(_parse_rule(number, item) for number, item in enumerate(items))


def _parse_rule(number: int, item: Json) -> Rule:
    if isinstance(item, dict):  # Null counts as absent, as in all requests.
        fields = cast("dict[str, Json]", item)
        item = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(item, Rule)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"rule {number + 1} is invalid: {exc}") from exc


def parse_approve(value: Json) -> Approve | None:
    """Parse the `approve` field of a prompt; raises `InvalidRequest`."""
    if value is None or value == "":
        return None
    if value in ("ask", "allow", "deny"):
        return value
    if not isinstance(value, list):
        raise InvalidRequest("approve must be ask, allow, deny or a list of rules")
    return parse_rules(cast("Json", value))
