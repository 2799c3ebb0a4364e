"""For tests of agents: a model that plays a script."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from culm.testing.model_server import ModelServer, open_model_server
    from culm.testing.script import Reply, Rule, Script, ScriptedCall, ScriptedUsage

__all__ = [
    "ModelServer",
    "Reply",
    "Rule",
    "Script",
    "ScriptedCall",
    "ScriptedUsage",
    "open_model_server",
]

_OF_THE_SERVER = ("ModelServer", "open_model_server")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of whatever is asked for
    """Import on demand: the server is also a program, which must not be imported before it runs."""
    if name not in __all__:
        raise AttributeError(name)
    module = "model_server" if name in _OF_THE_SERVER else "script"
    return getattr(import_module(f"culm.testing.{module}"), name)
