"""A scripted model server for tests of agents."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from culm.testing.model_server import ModelServer, open_model_server
    from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall, ScriptedUsage

__all__ = [
    "ModelServer",
    "Reply",
    "ReplyRule",
    "Script",
    "ScriptedCall",
    "ScriptedUsage",
    "open_model_server",
]

_SERVER_NAMES = ("ModelServer", "open_model_server")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the type depends on the name
    """Import on demand, because the server is also a program, which runs as `__main__`."""
    if name not in __all__:
        raise AttributeError(name)
    module = "model_server" if name in _SERVER_NAMES else "script"
    return getattr(import_module(f"culm.testing.{module}"), name)
