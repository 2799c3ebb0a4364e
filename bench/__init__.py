"""Measurements of culm beside the least code that could do the same work."""

import os

# Otherwise a server would compile its modules at every start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
