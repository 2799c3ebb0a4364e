"""What a worker, or a program it has do its work, finds in its environment. Pure."""

from collections.abc import Collection, Mapping
from typing import Final

_NEEDED: Final = frozenset(
    (
        *("HOME", "PATH", "SHELL", "TERM", "LANG", "LANGUAGE", "TMPDIR", "TZ", "USER", "LOGNAME"),
        *("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    )
)


def keyless_env(environ: Mapping[str, str], also: Collection[str] = ()) -> dict[str, str]:
    """The way about this machine and nobody's keys, but for what is named."""
    return {
        name: value
        for name, value in environ.items()
        if name in _NEEDED or name.startswith(("LC_", "XDG_")) or name in also
    }
