"""What a turn is held with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from culm.tools.base import Tool


@dataclass(frozen=True, slots=True)
class Setting:
    """What its journal must know of it."""

    model_id: str = ""
    provider_id: str = ""
    window: int = 0  # Tokens its context holds; 0 if unknown.
    tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    compacts: bool = True
