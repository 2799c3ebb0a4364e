"""Provider types: built-in ones and those of packages, loaded only when used."""

import os
import subprocess
import sys
from pathlib import Path

from culm.model.catalog import BUILT_IN, dialect_types, find_dialect

SECONDS = 30  # For a Python to start; a busy machine needs a few.

# A package with a working type, several broken ones and one that is built in already.
PACKAGE = """\
from culm.errors import ModelFailed

class Parrot:
    def __init__(self, setup):
        self.setup = setup

def refuse(setup):
    raise ModelFailed("No seed", "the parrot is hungry", hint="feed it")

def stumble(setup):
    raise KeyError("sk-secret")
"""
ENTRY_POINTS = """\
[culm.models]
parrot = parrots:Parrot
hungry = parrots:refuse
clumsy = parrots:stumble
gone = parrots.nowhere:Parrot
unnamed = parrots:Cockatoo
broken = broken_parrots:Parrot
openai = parrots:Parrot
"""


def run_python(code: str, folder: Path | None = None) -> str:
    """Run code in a new Python, with the packages in `folder`; return its output."""
    env = {**os.environ, "PYTHONPATH": str(folder or "")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "sk-secret" not in done.stdout
    return done.stdout


def install(folder: Path) -> Path:
    (folder / "parrots.py").write_text(PACKAGE)
    (folder / "broken_parrots.py").write_text("import no_such_module\n")
    info = folder / "parrots-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrots\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def test_every_built_in_type_is_found_and_an_unknown_one_is_not() -> None:
    assert dialect_types()[: len(BUILT_IN)] == list(BUILT_IN)
    assert [find_dialect(type_) for type_ in BUILT_IN] == list(BUILT_IN.values())
    assert find_dialect("klingon") is None
    assert find_dialect("") is None


def test_a_type_of_a_package_is_made_with_the_setup(tmp_path: Path) -> None:
    code = """
from culm.model.catalog import dialect_types, find_dialect
from culm.model.base import ProviderAccess, ModelSetup
from culm.wire.config import Model
import sys
print(dialect_types()[-6:])
dialect = find_dialect("parrot")
print(dialect.base_url, dialect.needs_key, dialect.needs_url, "parrots" in sys.modules)
setup = ModelSetup(None, ProviderAccess("parrot"), Model(id="m"), 1.0, 1.0)
model = dialect.make(setup)
print(type(model).__module__, model.setup is setup)
print(find_dialect("openai").base_url)
"""
    assert run_python(code, install(tmp_path)).splitlines() == [
        "['broken', 'clumsy', 'gone', 'hungry', 'parrot', 'unnamed']",
        " False False False",
        "parrots True",
        "https://api.openai.com/v1",
    ]


def test_a_broken_package_is_a_model_failure_with_the_reason(tmp_path: Path) -> None:
    code = """
from culm.errors import ModelFailed
from culm.model.catalog import find_dialect
for type_ in ("broken", "gone", "unnamed", "clumsy", "hungry"):
    try:
        find_dialect(type_).make(None)
    except ModelFailed as exc:
        print(exc.title, "|", exc.message, "|", exc.hint)
"""
    hint = "see the server's log, or remove the package that provides it"
    reasons = {
        "broken": "(broken_parrots:Parrot) cannot be used: ModuleNotFoundError",
        "gone": "(parrots.nowhere:Parrot) cannot be used: ModuleNotFoundError",
        "unnamed": "(parrots:Cockatoo) cannot be used: AttributeError",
        "clumsy": "(parrots:stumble) cannot be used: KeyError",
    }
    assert run_python(code, install(tmp_path)).splitlines() == [
        *(
            f"Model not available | the provider type {name!r} {reason} | {hint}"
            for name, reason in reasons.items()
        ),
        "No seed | the parrot is hungry | feed it",
    ]


def test_listing_the_types_loads_no_adapter_and_no_network_code() -> None:
    code = """
import sys
from culm.model.catalog import dialect_types, find_dialect
find_dialect("openai"), find_dialect("anthropic"), dialect_types()
names = ("openai", "anthropic", "offline")
adapters = {"aiohttp", *(f"culm.model.{name}.model" for name in names)}
print(sorted(adapters & sys.modules.keys()))
"""
    assert run_python(code) == "[]\n"


def test_a_package_with_damaged_entry_points_does_not_affect_others(tmp_path: Path) -> None:
    info = tmp_path / "damaged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[culm.models]\nno equals sign\n")
    code = """
from culm.model.catalog import BUILT_IN, dialect_types, find_dialect
print(dialect_types() == list(BUILT_IN), find_dialect("klingon"))
"""
    assert run_python(code, tmp_path) == "True None\n"
