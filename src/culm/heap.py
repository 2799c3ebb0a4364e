"""Settings of the C library's heap, for processes that live long.

By default glibc gives every thread a heap of its own, and after the first large block is freed it
takes later large blocks from a heap instead of asking the kernel for them. Both keep memory that
nobody uses: after 20 minutes of mixed use a server had 130 MB instead of 80.
"""

import ctypes

HEAPS_MAX = 2  # One for the event loop, one that all other threads share.
# Larger blocks come from the kernel and go back to it; 1 MB answers and history pass through.
BLOCK_BYTES = 128 << 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def limit_heap() -> None:
    """Return freed memory to the kernel early. Does nothing with other C libraries."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, HEAPS_MAX)
        library.mallopt(_M_MMAP_THRESHOLD, BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, BLOCK_BYTES)
