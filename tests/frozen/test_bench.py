"""The frozen baseline of the benchmarks names the ratios that they declare."""

from bench.baseline import WORSE_MAX, Baseline, Newest, compare, read_baseline
from bench.ratios import DECLARED, Ratio


def test_baseline_names_exactly_the_declared_ratios() -> None:
    frozen = {bench: list(ratios) for bench, ratios in read_baseline().ratios.items()}
    assert frozen == {bench: list(names) for bench, names in DECLARED.items()}


def test_names_of_ratios_are_unique() -> None:
    names = [name for ratios in DECLARED.values() for name in ratios]
    assert len(names) == len(set(names))


def test_ratio_that_is_worse_by_more_than_the_factor_is_reported() -> None:
    before = {
        "help": Ratio(2.0, "x"),
        "ps": Ratio(2.0, "x", at_least=True),
        "run_cold": Ratio(1, "x"),
    }
    now = {"help": Ratio(2.0 * WORSE_MAX + 0.1, "x"), "ps": Ratio(1.0, "x", at_least=True)}
    compared = compare({"cli": Newest(now)}, Baseline("", {}, {"cli": before}))
    verdicts = {one.name: one.verdict for one in compared if one.before is not None}
    assert verdicts == {"help": "WORSE", "ps": "WORSE", "run_cold": "not measured"}
