"""Hide secrets in a configuration: references may be shown, values and literal keys may not."""

import re
from typing import cast

from culm.config import jsonc
from culm.config.checking import Document
from culm.wire.codec import Json

SECRET = "[secret]"

# Fields that only the provider may see.
KEY_FIELDS = frozenset(
    {"api_key", "oauth", "oauth_client_secret", "oauth_token", "extra_headers", "headers"}
)
# Further fields that may contain a key.
SECRET_FIELDS = KEY_FIELDS | {"args", "env", "extra_body", "provider_options"}

# A default (`${NAME:-…}`) is a literal, so such a text is not a mere reference.
_REFERENCE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\}|\((?:[^()]|\([^()]*\))*\))", re.ASCII)
_SCHEMES = ("", "Bearer ", "Basic ", "Token ")  # Before a reference, in a header.
_CREDENTIALS = re.compile(r"(?<=//)[^/?#\s]*@|\?[^#\s]+")  # In a URL.


def without_secrets(value: Json, path: jsonc.Path = ()) -> Json:
    """The value at a path of a configuration, safe to show to anybody."""
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
    """A text without the user and the query of the URLs in it."""
    return _CREDENTIALS.sub("", text) if "//" in text else text
