"""What goes with a prompt, as a person says it: model, budget, time, files. Pure but for the files.

All of it is read before anything is started, so that what is wrong starts nothing.
"""

import mimetypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from culm.errors import InvalidRequest
from culm.wire.agent import Attachment
from culm.wire.codec import printable
from culm.wire.config import ProviderConfig, SelectedModel
from culm.wire.runs import Limits

T = TypeVar("T", int, float)

FILE_BYTES_MAX = 10 << 20  # As the server takes it; a test holds it to it ...
FILES_BYTES_MAX = 44 << 20  # ... and all of them, in the text that they become on the wire.
FILES_MAX = 100

AMOUNT_MAX = 10**15  # More is a slip of the finger, and fits no wire.

_MONEY = re.compile(r"\$?(\d+(?:\.\d+)?)\$?(?:usd)?", re.IGNORECASE)
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([km]?)\s*tok(?:ens?)?", re.IGNORECASE)
_STEPS = re.compile(r"(\d+)\s*steps?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}


def choose_model(text: str, providers: Mapping[str, ProviderConfig]) -> SelectedModel:
    """PROVIDER/MODEL, or a MODEL that one provider alone has; raises `InvalidRequest`."""
    usable = {name: one for name, one in providers.items() if not one.disable}
    provider, _, model = text.partition("/")
    if provider in usable and model:
        return SelectedModel(model=model, provider=provider)
    owners = [name for name, one in usable.items() if text in {m.id for m in one.models}]
    if len(owners) == 1:
        return SelectedModel(model=text, provider=owners[0])
    if owners:
        hint = "say " + " or ".join(f"{name}/{text}" for name in owners)
        raise InvalidRequest(f"more than one provider has the model {text}", hint=hint)
    known = [f"{name}/{model.id}" for name, one in usable.items() for model in one.models]
    hint = f"there is {', '.join(known[:5])}" if known else "docs/models.md tells how to add one"
    raise InvalidRequest(f"no provider has a model {text}", hint=hint)


def limits_of(budgets: Sequence[str], timeout: str) -> Limits:
    """What a run may use up; raises `InvalidRequest`."""
    limits = Limits(wall_s=_seconds(timeout) if timeout else 0)
    for text in budgets:
        said = text.strip().replace(",", "")
        if (money := _MONEY.fullmatch(said)) is not None:
            limits.cost = _positive(_counted(float(money[1]), text), text)
        elif (tokens := _TOKENS.fullmatch(said)) is not None:
            factor = _FACTORS[tokens[2].lower()]
            limits.tokens = _positive(int(_counted(float(tokens[1]) * factor, text)), text)
        elif (steps := _STEPS.fullmatch(said)) is not None:
            limits.steps = _positive(int(_counted(float(steps[1]), text)), text)
        else:
            hint = "say 0.50 (USD), 200ktokens or 20steps; it may be given for each"
            raise InvalidRequest(f"{printable(text)} is no budget", hint=hint)
    return limits


def _seconds(text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest(f"{printable(text)} is no time", hint="say 90, 90s, 5m or 1h")
    value = float(found[1]) * _SECONDS[(found[2] or "s").lower()]
    return _positive(_counted(value, text), text)


def _counted(value: float, text: str) -> float:
    """A number of many digits may be infinite, which on the wire is no limit at all."""
    if value > AMOUNT_MAX:
        raise InvalidRequest(f"{printable(text)} is more than can be counted", hint="give less")
    return value


def _positive(value: T, text: str) -> T:
    """None of them may be nothing: on the wire that is no limit at all."""
    if value <= 0:
        raise InvalidRequest(f"{printable(text)} leaves nothing to do", hint="give more than 0")
    return value


def read_attachments(files: Sequence[Path]) -> list[Attachment]:
    """The files, whole; raises `InvalidRequest`, which names the one that cannot be attached."""
    if len(files) > FILES_MAX:
        raise InvalidRequest(f"at most {FILES_MAX} files can be attached")
    found = [_attachment(file) for file in files]
    if sum(len(one.content) for one in found) > FILES_BYTES_MAX:
        raise InvalidRequest(f"together they may have at most {FILES_BYTES_MAX >> 20} MiB")
    return found


def _attachment(file: Path) -> Attachment:
    name = printable(str(file))
    try:
        if file.is_dir():
            hint = "name its files, or let the agent read it: it can"
            raise InvalidRequest(f"cannot attach {name}: it is a directory", hint=hint)
        if not file.is_file() and file.exists():
            raise InvalidRequest(f"cannot attach {name}: it is no file")
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        hint = "a path is from the directory you are in"
        raise InvalidRequest(f"cannot attach {name}: {exc.strerror}", hint=hint) from exc
    if len(content) > FILE_BYTES_MAX:
        hint = "let the agent read a part of it: it can"
        message = f"cannot attach {name}: it has more than {FILE_BYTES_MAX >> 20} MiB"
        raise InvalidRequest(message, hint=hint)
    kind = _type_of(file, content)
    if not kind.startswith(("text/", "image/")):
        hint = "attach text or an image, or let the agent look at it"
        raise InvalidRequest(f"cannot attach {name}: no model is given {kind}", hint=hint)
    return Attachment(str(file.absolute()), file.name, kind, content)


def _type_of(file: Path, content: bytes) -> str:
    """What its name says if that is an image; else text if it is, whatever the name says."""
    guessed = mimetypes.guess_type(file.name)[0] or ""
    if guessed.startswith("image/") and guessed != "image/svg+xml":
        return guessed
    try:
        content.decode()
    except UnicodeDecodeError:
        return guessed or "application/octet-stream"
    return guessed if guessed.startswith("text/") else "text/plain"
