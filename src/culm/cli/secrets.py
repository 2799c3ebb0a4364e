"""What of a configuration may be shown: a reference may, what it leads to and a literal key not."""

import re
from typing import cast

from culm.config import jsonc
from culm.config.checking import Document
from culm.wire.codec import Json

SECRET = "[secret]"

# What is for a provider's eyes only.
KEY_FIELDS = frozenset(
    {"api_key", "oauth", "oauth_client_secret", "oauth_token", "extra_headers", "headers"}
)
# Where a key may stand as well.
SECRET_FIELDS = KEY_FIELDS | {"args", "env", "extra_body", "provider_options"}

# A default (`${NAME:-…}`) is written out, so it is no mere reference.
_REFERENCE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\}|\((?:[^()]|\([^()]*\))*\))", re.ASCII)
_SCHEMES = ("", "Bearer ", "Basic ", "Token ")  # Before a reference, in a header.
_CREDENTIALS = re.compile(r"(?<=//)[^/?#\s]*@|\?[^#\s]+")  # In an address.


def without_secrets(value: Json, path: jsonc.Path = ()) -> Json:
    """What stands at a path of a configuration, fit to be shown to anybody."""
    if isinstance(value, dict):
        fields = cast("Document", value)
        return {name: without_secrets(inner, (*path, name)) for name, inner in fields.items()}
    if isinstance(value, list):
        items = cast("list[Json]", value)
        return [without_secrets(inner, path) for inner in items]
    if isinstance(value, str):
        is_secret = not SECRET_FIELDS.isdisjoint(path)
        return _hidden_text(value) if is_secret else without_credentials(value)
    return value


def _hidden_text(text: str) -> str:
    found = _REFERENCE.search(text)
    is_reference = found is not None and _REFERENCE.sub("", text) in _SCHEMES
    return text if is_reference or not text else SECRET


def without_credentials(text: str) -> str:
    """A text without the user and the query of the addresses in it."""
    return _CREDENTIALS.sub("", text) if "//" in text else text
