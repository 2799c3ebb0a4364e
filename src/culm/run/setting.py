"""What a turn is held with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from culm.run.context import needs_summary
from culm.tools.base import Tool
from culm.wire.runs import Used


@dataclass(frozen=True, slots=True)
class JournalSetting:
    """What its journal must know of it."""

    model_id: str = ""
    provider_id: str = ""
    window: int = 0  # Tokens its context holds; 0 if unknown.
    tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    compacts: bool = True

    def is_nearly_full(self, used: Used | None) -> bool:
        """Whether what an answer used leaves so little room that it should be summarized."""
        return self.compacts and used is not None and needs_summary(self.window, used.all_tokens)
