"""Settings of the C library's heap, for processes that live long.

By default glibc gives every thread a heap of its own, and once it has freed a large block it takes
later ones of up to 32 MB from a heap instead of asking the kernel for them. Both keep memory that
nobody uses.
"""

import ctypes

HEAPS_MAX = 2  # One for the event loop, one that all other threads share.
# Larger blocks come from the kernel and return to it. With 128 KiB, every read of a fast stream was
# one, and a cancel beside ten of them took half as long again.
BLOCK_BYTES = 1 << 20
FREE_BYTES = 4 << 20  # So much may stay free at the end of a heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def limit_heap() -> None:
    """Return freed memory to the kernel. Does nothing with other C libraries."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, HEAPS_MAX)
        library.mallopt(_M_MMAP_THRESHOLD, BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, FREE_BYTES)
