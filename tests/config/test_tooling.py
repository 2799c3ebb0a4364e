"""Tool configuration: only trusted files can set it."""

import json
import re
from pathlib import Path

import pytest

from culm.config.checking import Document, check_text
from culm.config.layers import ToolConfig, merged, read_tooling
from culm.config.schema import HOOKS_MAX, Hook, OwnTool, UserFile
from culm.config.sources import FileSources, TrustedFiles, untrusted_notice
from culm.errors import InvalidRequest
from culm.wire.asks import Rule
from culm.wire.codec import Json

DOCUMENT: Document = {
    "permissions": {"allowed_tools": ["view", "bash:execute"]},
    "permission_rules": [{"decision": "deny", "command": "rm *"}],
    "hooks": {"PreToolUse": [{"command": "guard", "matcher": "bash"}], "Stop": [{"command": "x"}]},
    "own_tools": {"deploy": {"command": ["./deploy"], "description": "Deploys."}},
    "options": {"disabled_tools": ["fetch"]},
    "env": {"A": "a", "KEY": "$SECRET"},
}
TOOLING = ToolConfig(
    allowed_tools=("view", "bash:execute"),
    disabled_tools=frozenset({"fetch"}),
    rules=(Rule("deny", command="rm *"),),
    hooks=(Hook("guard", matcher="bash"),),
    own_tools={"deploy": OwnTool(["./deploy"], "Deploys.")},
    env={"A": "a"},
)


def test_all_tool_settings_of_a_document_are_read() -> None:
    assert read_tooling(DOCUMENT) == TOOLING
    assert read_tooling({}) == read_tooling(dict.fromkeys(DOCUMENT)) == ToolConfig()


def test_rules_and_hooks_are_read_whatever_the_case_of_their_key() -> None:
    whole: Document = {**DOCUMENT, "Permission_Rules": [{"decision": "ask"}]}
    whole["HOOKS"] = {"PreToolUse": [{"command": "more"}]}
    tooling = read_tooling(whole)
    assert tooling.rules == (*TOOLING.rules, Rule("ask"))
    assert tooling.hooks == (*TOOLING.hooks, Hook("more"))


@pytest.mark.parametrize(
    "bad",
    [
        {"permission_rules": {}},
        {"permission_rules": [{"decision": "allow", "comand": "ls"}]},
        {"hooks": {"PreToolUse": [{"matcher": "bash"}]}},
        {"hooks": {"PreToolUse": [{"command": f"{n}"} for n in range(HOOKS_MAX + 1)]}},
        {"own_tools": {"Bad Name": {"command": "a", "description": "d"}}},
        {"own_tools": {"t": {"command": "a"}}},
        {"options": {"disabled_tools": "all"}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_tool_settings_are_refused(bad: Document) -> None:
    with pytest.raises(InvalidRequest):
        read_tooling(bad)


async def test_tool_settings_of_a_project_are_ignored_until_its_file_is_trusted(
    tmp_path: Path,
) -> None:
    file, trusted = tmp_path / "culm.json", TrustedFiles(tmp_path / "data")
    file.write_text(json.dumps(DOCUMENT))
    sources = FileSources(None, tmp_path, trusted)
    untrusted = await sources.load(())
    assert read_tooling(merged(untrusted.project)) == ToolConfig()
    keys = {"env", "hooks", "options", "own_tools", "permission_rules", "permissions"}
    assert untrusted.notices == (untrusted_notice(file, keys),)
    trusted.add({file: file.read_bytes()})
    assert read_tooling(merged((await sources.load(())).project)) == TOOLING


async def test_a_trusted_project_adds_to_the_rules_and_hooks_of_the_user(tmp_path: Path) -> None:
    user, project = tmp_path / "user.json", tmp_path / "culm.json"
    own: Json = {"permission_rules": [{"decision": "deny", "path": "~/**"}]}
    user.write_text(json.dumps({**own, "hooks": {"PreToolUse": [{"command": "mine"}]}}))
    project.write_text(json.dumps(DOCUMENT))
    trusted = TrustedFiles(tmp_path / "data")
    trusted.add({project: project.read_bytes()})
    loaded = await FileSources(user, tmp_path, trusted).load(())
    tooling = read_tooling(merged([loaded.user, *loaded.project]))
    assert tooling.rules == (Rule("deny", path="~/**"), *TOOLING.rules)
    assert tooling.hooks == (Hook("mine"), *TOOLING.hooks)


def test_the_examples_in_the_documentation_are_valid() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "configuration.md"
    examples = re.findall(r"```jsonc\n(.*?)```", page.read_text(), re.DOTALL)
    read = [check_text(text, UserFile, "f") for text in examples]
    assert [checked.problems for checked in read] == [()] * len(examples)
    tooling = read_tooling(merged(checked.document for checked in read))
    assert len(tooling.rules) == 5
    assert [hook.name for hook in tooling.hooks] == ["no secrets"]
    assert list(tooling.own_tools) == ["ticket"]
