"""Safeguards switched off by a patch, and the search for a random world that notices it."""

from collections.abc import Callable
from functools import partial

import pytest

Ablation = Callable[[pytest.MonkeyPatch], None]

# The rarest failures show in one world of a hundred. If a change of the product or of the worlds
# makes a drawn seed miss, this many find another one; then the test is slow, and still true.
SEEDS = range(1_000)
SEARCH_S = 600.0
searches = pytest.mark.timeout(SEARCH_S)


def is_found(world: Callable[[int], object], drawn: int) -> bool:
    """Return True if the drawn seed or one of many others makes the world fail."""
    return any(is_detected(partial(world, seed)) for seed in (drawn, *SEEDS))


def is_detected(world: Callable[[], object]) -> bool:
    try:
        world()
    except AssertionError:
        return True
    except BaseExceptionGroup as exc:
        # The disabled safeguard must cause the failure; a broken ablation proves nothing.
        return exc.subgroup((TypeError, AttributeError, NameError, LookupError)) is None
    return False


def do_nothing(*_: object) -> None:
    pass


def name_of(value: object) -> str:
    return getattr(value, "__name__", "")
