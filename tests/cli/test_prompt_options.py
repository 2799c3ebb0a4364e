"""Options of a prompt: budgets, timeouts, attachments and models."""

from pathlib import Path

import pytest

from culm.cli.prompt_options import FILE_BYTES_MAX, choose_model, limits_of, read_attachments
from culm.errors import InvalidRequest
from culm.wire.config import Model, ProviderConfig, SelectedModel
from culm.wire.runs import Limits
from culm.workspace.run_service import ATTACHMENT_BYTES_MAX, ATTACHMENTS_MAX

PROVIDERS = {
    "near": ProviderConfig(models=[Model(id="small"), Model(id="both")]),
    "far": ProviderConfig(models=[Model(id="maker/big"), Model(id="both")]),
    "off": ProviderConfig(models=[Model(id="hidden")], disable=True),
}


@pytest.mark.parametrize(
    ("budgets", "timeout", "limits"),
    [
        ((), "", Limits()),
        (("0.50",), "", Limits(cost=0.5)),
        (("$2",), "90", Limits(cost=2, wall_s=90)),
        (("200ktokens",), "5m", Limits(tokens=200_000, wall_s=300)),
        (("1.5M tok", "20 steps", "0.01usd"), "1h", Limits(3600, 20, 1_500_000, 0.01)),
        (("1,000tokens",), "0.5s", Limits(tokens=1000, wall_s=0.5)),
    ],
)
def test_budgets_and_timeouts_accept_common_units(
    budgets: tuple[str, ...], timeout: str, limits: Limits
) -> None:
    assert limits_of(budgets, timeout) == limits


@pytest.mark.parametrize(
    ("budgets", "timeout"), [(("0",), ""), (("-1",), ""), (("ten",), ""), ((), "0s"), ((), "1y")]
)
def test_invalid_budget_or_timeout_is_refused_with_a_hint(
    budgets: tuple[str, ...], timeout: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        limits_of(budgets, timeout)
    assert refused.value.hint


def test_attachment_type_and_size_limits_match_the_server(
    tmp_path: Path,
) -> None:
    assert (FILE_BYTES_MAX, 100) == (ATTACHMENT_BYTES_MAX, ATTACHMENTS_MAX)
    contents = {"a.py": b"x = 1", "b.png": b"\x89PNG", "c": "schön".encode(), "d.svg": b"<svg/>"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = read_attachments([tmp_path / name for name in contents])
    kinds = ["text/x-python", "image/png", "text/plain", "text/plain"]
    assert [(one.file_name, one.mime_type) for one in found] == [*zip(contents, kinds, strict=True)]


@pytest.mark.parametrize(
    ("text", "provider", "model"),
    [
        ("near/small", "near", "small"),
        ("near/unheard-of", "near", "unheard-of"),
        ("far/maker/big", "far", "maker/big"),
        ("maker/big", "far", "maker/big"),
        ("small", "near", "small"),
    ],
)
def test_model_is_found_with_its_provider_or_by_a_unique_id(
    text: str, provider: str, model: str
) -> None:
    assert choose_model(text, PROVIDERS) == SelectedModel(model=model, provider=provider)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("both", "use near/both or far/both"),
        ("nothing", "known: near/small, near/both, far/maker/big, far/both"),
        ("off/hidden", "known: near/small, near/both, far/maker/big, far/both"),
        ("near/", "known: near/small, near/both, far/maker/big, far/both"),
    ],
)
def test_unknown_or_ambiguous_model_is_refused_with_the_known_ones(text: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        choose_model(text, PROVIDERS)
    assert refused.value.hint == hint


def test_budgets_and_timeout_become_limits() -> None:
    budgets = ["0.50", "1.5ktokens", "20steps"]
    assert limits_of(budgets, "5m") == Limits(cost=0.5, tokens=1500, steps=20, wall_s=300)


@pytest.mark.parametrize("text", ["0", "0.5tokens", "0steps", "9" * 400, f"{'9' * 400}steps"])
def test_zero_fractional_or_huge_budget_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        limits_of([text], "")


@pytest.mark.parametrize("text", ["0", "0ms", "9" * 400, "99999999999999d"])
def test_zero_or_huge_timeout_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        limits_of([], text)
