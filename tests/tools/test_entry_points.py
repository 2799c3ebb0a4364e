"""Tools of other packages: made with the tool context; a broken one does not affect others."""

import re
from pathlib import Path

from tests.model.test_dialects import run_python

# A package with working tools and with every kind of broken one.
PACKAGE = """\
from dataclasses import dataclass
from culm.model.base import ToolSpec
from culm.tools.base import CallResult

@dataclass
class Parrot:
    name: str = "parrot"
    context: object = None
    crash: str = "again"
    parallel: bool = True

    @property
    def spec(self):
        return ToolSpec(self.name, "Repeats.", {"type": "object", "properties": {}})

    async def prepare(self, call):
        return CallResult(call.input)

def one(context): return Parrot(context=context)
def two(context): return [Parrot("grey"), Parrot("view"), Parrot("grey"), Parrot("no name!")]
def odd(context): yield Parrot("careless", crash="maybe"); yield Parrot("x", parallel=1); yield 7
def nothing(context): return None
def stumble(context): raise KeyError("no context")
def leave(context): yield Parrot("early"); raise SystemError("later")
not_callable = 5
"""
ENTRY_POINTS = """\
[culm.tools]
a_one = parrots:one
b_two = parrots:two
c_odd = parrots:odd
d_nothing = parrots:nothing
e_stumble = parrots:stumble
f_leave = parrots:leave
g_number = parrots:not_callable
h_gone = parrots.nowhere:one
i_broken = broken_parrots:one
"""
CODE = """
import logging, sys
lines = []
class Kept(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger().addHandler(Kept())
from culm.tools.registry import package_tools
assert "parrots" not in sys.modules
context = object()
tools = package_tools(context, {"view": None})
print(sorted(tools), tools["parrot"].context is context)
print(*lines, sep="\\n")
"""


PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"
THROW = """
import asyncio
from culm.tools.base import CallRequest
from culm.tools.registry import package_tools
async def throw(sides):
    dice = package_tools(object(), ())["dice"]
    plan = await dice.prepare(CallRequest("c", "dice", "", {"sides": sides}))
    return await plan.run(print) if hasattr(plan, "run") else plan
print(asyncio.run(throw(1)).content, asyncio.run(throw(0)).content, sep="\\n")
"""


def install(folder: Path, name: str, code: str, entry_points: str) -> Path:
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return folder


def test_package_tools_get_the_context_and_broken_ones_are_left_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken_parrots.py").write_text("import no_such_module\n")
    install(tmp_path, "parrots", PACKAGE, ENTRY_POINTS)
    assert run_python(CODE, tmp_path).splitlines() == [
        "['grey', 'parrot'] True",
        "the tools g_number (parrots:not_callable) cannot be loaded",
        "the tools h_gone (parrots.nowhere:one) cannot be loaded",
        "the tools i_broken (broken_parrots:one) cannot be loaded",
        "a tool of b_two is not used: there is a tool view already",
        "a tool of b_two is not used: there is a tool grey already",
        "a tool of b_two is not used: 'no name!' is not a valid tool name",
        "a tool of c_odd is not used: careless does not define crash",
        "a tool of c_odd is not used: x does not define parallel",
        "a tool of c_odd is not used: 7 has no spec",
        "the tools d_nothing cannot be made",
        "the tools e_stumble cannot be made",
        "the tools f_leave cannot be made",
    ]


def test_no_packages_give_no_tools() -> None:
    code = "from culm.tools.registry import package_tools\nprint(package_tools(object(), ()))"
    assert run_python(code) == "{}\n"


def test_the_example_in_the_documentation_works(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    install(tmp_path, "dice", code, "[culm.tools]\ndice = dice:make\n")
    assert run_python(THROW, tmp_path) == "1\ndice: sides must be a whole number above 0\n"
