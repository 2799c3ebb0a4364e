"""The entry point of `./check`: the steps and their order."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.suite.hunt import hunt
from tests.suite.steps import ROOT, Interrupted, Steps, open_steps, test_all, workers

EPILOG = """examples:
  ./check                            all that CI runs
  ./check tests/flow                 the tests of one folder
  ./check --hunt 20                  look for flaky tests: 20 times the whole suite
  ./check --hunt 50 tests/client     the same, for some of them
"""


def main() -> int:
    options = _parse()
    os.environ["PYTHONPYCACHEPREFIX"] = str(ROOT / ".venv" / "pycache")
    # Else each of hundreds of interpreters would compile all of culm.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if options.fast or options.broad:
        os.environ["CULM_BREADTH"] = "0.5" if options.fast else "5"
    try:
        with open_steps() as steps:
            if options.fix:
                _fix(steps)
            elif options.hunt:
                return hunt(steps, options.hunt, options.paths, options.python)
            elif options.paths:
                is_small = all(Path(path.partition("::")[0]).is_file() for path in options.paths)
                count = 0 if is_small else workers()
                steps.test("tests", "-n", str(count), *options.paths)
            else:
                _check(steps, is_fast=options.fast)
    except Interrupted as exc:
        return 128 + exc.number
    for line in steps.outcome.summary():
        print(line)
    return 0 if steps.outcome.is_good else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./check",
        description="Run every check that CI runs, or some of them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    only_one = parser.add_mutually_exclusive_group()
    only_one.add_argument("--fast", action="store_true", help="leave out live/ and most seeds")
    only_one.add_argument("--broad", action="store_true", help="try more seeds, examples, sockets")
    only_one.add_argument("--fix", action="store_true", help="repair format, lint and pages")
    only_one.add_argument("--hunt", type=int, metavar="N", help="run the tests N times, disturbed")
    parser.add_argument(
        "--python", default="python3.13", metavar="PATH", help="another interpreter for a hunt"
    )
    parser.add_argument("paths", nargs="*", help="tests to run instead of all checks")
    return parser.parse_args()


def _check(steps: Steps, *, is_fast: bool) -> None:
    steps.run("ruff format", "ruff", "format", "--check", ".")
    steps.run("ruff check", "ruff", "check", ".")
    # Types take a minute of one core; their result is printed after the tests beside them.
    print("== basedpyright, beside the tests", flush=True)
    with tempfile.TemporaryFile(dir=steps.disk) as output:
        types = steps.start(["basedpyright"], output=output)
        if is_fast:
            steps.test("tests", "-n", str(workers()), "--ignore", "tests/live")
        else:
            test_all(steps.test, workers())
        steps.finish("basedpyright", types, output)


def _fix(steps: Steps) -> None:
    steps.run("ruff format", "ruff", "format", ".")
    steps.run("ruff check", "ruff", "check", "--fix", ".")
    steps.run("pages", sys.executable, "-m", "tests.pages")


if __name__ == "__main__":
    sys.exit(main())
