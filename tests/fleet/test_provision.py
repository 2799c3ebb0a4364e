"""The provision document: defaults, validation and hidden secrets."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.files import UnsafeName, check_name, is_safe_name
from culm.fleet.provision import (
    PROVISION_BYTES_MAX,
    BadProvision,
    Capabilities,
    ClaudeKind,
    CliKind,
    CodexKind,
    Credential,
    CulmExtension,
    EchoKind,
    Identity,
    LocalPlacement,
    ModelName,
    OwnerStamp,
    Provision,
    ProvisionLimits,
    RuntimeKind,
    Secrets,
    encode_provision,
    parse_provision,
)
from culm.wire.codec import Json
from tests.support import contract

MINIMAL: dict[str, Json] = {
    "version": 1,
    "identity": {"child_id": "c1"},
    "executor": {"kind": "echo"},
    "fabric_dir": "/f",
}
OWNER: dict[str, Json] = {"process_id": 7, "instance_id": "i", "worker_spawned_at": ""}
FULL = Provision(
    version=2,
    identity=Identity("c-1.x", "p", "k", "researcher", 1),
    executor=CliKind("agent", ["--fast"], input="argument", output="json"),
    fabric_dir="/f",
    owner=OwnerStamp(7, "i", "2026-11-16T00:00:00Z", 99, "s"),
    storage_dir="/s",
    workspace="/w",
    model=ModelName("demo", "demo-1"),
    disabled_tools=["bash"],
    limits=ProvisionLimits(60.5, 300.0, 8),
    secrets=Secrets([Credential("demo", "sk-hidden", "http://x", "openai", "r")], "token-hidden"),
    reusable=True,
    placement=LocalPlacement(),
    capabilities=Capabilities(
        enforce_permissions=True, nested_spawn=True, mcp_proxy={"token": "x-hidden"}
    ),
    culm=CulmExtension(3, host_calls=True, env={"KEY": "env-hidden"}, rules={"allow": []}),
)


def parse(**changes: Json) -> Provision:
    return parse_provision(json.dumps(MINIMAL | changes).encode())


@contract("FLEET-46")
def test_minimal_document_has_defaults_and_full_document_round_trips() -> None:
    expected = Provision(version=1, identity=Identity("c1"), executor=EchoKind(), fabric_dir="/f")
    unknown: dict[str, Json] = {
        "later": 1,
        "identity": {"child_id": "c1", "later": []},
        "limits": {"later": None},
    }
    assert parse() == parse(**unknown) == expected
    assert (expected.placement, expected.reusable, expected.limits) == (
        LocalPlacement(),
        False,
        ProvisionLimits(),
    )
    assert parse_provision(b"\n " + encode_provision(FULL) + b" \n") == FULL
    limits = json.loads(encode_provision(FULL))["limits"]
    assert repr(limits) == "{'run_timeout_secs': 60.5, 'idle_timeout_secs': 300, 'max_rounds': 8}"


@contract("FLEET-47")
def test_executor_tags_match_the_wire() -> None:
    kinds = (
        ({"kind": "echo"}, EchoKind()),
        ({"kind": "bamboo_runtime"}, RuntimeKind()),
        ({"kind": "cli_adapter", "command": "a"}, CliKind("a")),
        ({"kind": "claude_code"}, ClaudeKind()),
        ({"kind": "codex"}, CodexKind()),
    )
    for document, kind in kinds:
        assert parse(executor=document).executor == kind
        assert msgspec.json.decode(msgspec.json.encode(kind)) == document


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executor": {"kind": "warp"}}, "Invalid value 'warp'"),
        ({"executor": {"kind": "cli_adapter"}}, "missing required field `command`"),
        ({"identity": {"child_id": "../c"}}, "child_id is not a safe id"),
        ({"identity": {"child_id": ""}}, "child_id is not a safe id"),
        ({"identity": {"child_id": "c" * 201}}, "at most 200"),
        ({"identity": {"child_id": "c", "depth": -1}}, "depth is negative"),
        ({"limits": {"run_timeout_secs": -1}}, "limits.run_timeout_secs must be"),
        ({"limits": {"idle_timeout_secs": 0}}, "limits.idle_timeout_secs must be"),
        ({"limits": {"max_rounds": 0}}, "limits.max_rounds must be"),
        ({"limits": {"max_rounds": -(10**40)}}, "limits"),
        ({"limits": {"run_timeout_secs": "soon"}}, "Expected `float | null`, got `str`"),
        ({"fabric_dir": ""}, "fabric_dir is not a path"),
        ({"workspace": "a\0b"}, "workspace is not a path"),
        ({"bus": {"endpoint": "ws://b", "token": "t-hidden"}}, "a bus is not supported"),
        ({"version": 0}, "version must be at least 1"),
        ({"culm": {"control_fd": 1}}, "control_fd must be"),
        ({"culm": {"control_fd": 1 << 31}}, "control_fd must be"),
        ({"culm": {"ask_s": 0}}, "ask_s must be a number above 0"),
        ({"culm": {"ask_s": 1e300}}, "ask_s must be a number above 0"),
        ({"owner": OWNER | {"process_id": 0}}, "owner.process_id is not a process id"),
        ({"owner": OWNER | {"process_id": -1}}, "owner.process_id is not a process id"),
        ({"owner": OWNER | {"process_id": 1 << 31}}, "owner.process_id is not a process id"),
        ({"owner": OWNER | {"process_start_id": -1}}, "owner.process_start_id is negative"),
        ({"capabilities": {"native_tool_ceiling_required": True}}, "is not supported"),
        ({"capabilities": {"native_tool_ceiling": {"tools": []}}}, "is not supported"),
        ({"capabilities": {"required_child_context": True}}, "is not supported"),
    ],
)
def test_invalid_provision_field_is_refused_in_one_line(
    changes: dict[str, Json], message: str
) -> None:
    with pytest.raises(BadProvision) as refused:
        parse(**changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x" * (PROVISION_BYTES_MAX + 1), "more than 8 MiB"),
        (b" \n", "no provision"),
        (b'{"version": 1,', "not valid JSON"),
        (b'{"version": NaN}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a":' + b"[" * 100_000, "not valid JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (json.dumps(MINIMAL)[:-1].encode() + b',"version":2}', "a key twice"),
        (json.dumps(MINIMAL)[:-1].encode() + b',"x":{"a":1,"a":1}}', "a key twice"),
    ],
)
def test_invalid_document_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadProvision, match=message):
        parse_provision(data)


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadProvision):
        parse_provision(data)


@contract("FLEET-48")
def test_mcp_and_mcp_proxy_exclude_each_other() -> None:
    both: dict[str, Json] = {"mcp": {}, "mcp_proxy": {"orchestrator": "o"}}
    for capabilities in (both, both | {"mcp": [1]}):
        with pytest.raises(BadProvision, match="mcp_proxy exclude each other"):
            parse(capabilities=capabilities)
    made = msgspec.structs.replace(FULL, capabilities=Capabilities(mcp={}, mcp_proxy={}))
    with pytest.raises(BadProvision, match="mcp_proxy exclude each other"):
        encode_provision(made)
    assert parse(capabilities={"mcp": None, "mcp_proxy": {}}).capabilities.mcp is None
    endless = msgspec.structs.replace(FULL, limits=ProvisionLimits(math.nan))
    with pytest.raises(BadProvision, match="run_timeout_secs"):
        encode_provision(endless)


@contract("FLEET-50")
def test_legacy_permission_names_work_and_incomplete_pairs_are_refused() -> None:
    def modes(requested: str, effective: str, **flags: bool) -> Capabilities:
        named = {
            "permission_requested_mode": requested,
            "permission_effective_mode": effective,
        }
        return parse(capabilities=named | flags).capabilities

    assert parse(capabilities={"guardian_read_only": True}).capabilities.is_read_only
    assert parse(capabilities={"read_only": True}).capabilities.is_read_only
    assert not parse().capabilities.is_read_only
    legacy = [
        parse(capabilities=flags).capabilities.mode
        for flags in ({"auto_approve_permissions": True}, {"bypass": True}, {})
    ]
    assert legacy == ["auto", "bypass", "default"]
    assert modes("auto", "plan", auto_approve_permissions=True).mode == "plan"
    assert modes("default", "accept_edits").mode == "accept_edits"
    assert modes("default", "bypass", bypass=True).mode == "bypass"
    for requested, effective, message in (
        ("default", "", "provided together"),
        ("", "plan", "provided together"),
        ("default", "warp", "an unknown permission mode"),
        ("plan", "plan", "an unknown permission mode"),
        ("auto", "bypass", "are inconsistent"),
        ("bypass", "default", "are inconsistent"),
        ("bypass", "bypass", "contradict"),
        ("auto", "plan", "contradict"),
    ):
        with pytest.raises(BadProvision, match=message):
            modes(requested, effective)
    with pytest.raises(BadProvision, match="exclude each other"):
        parse(capabilities={"bypass": True, "auto_approve_permissions": True})


@contract("FLEET-34", "FLEET-49")
def test_secrets_are_not_in_repr_and_unset_token_is_not_written() -> None:
    assert "hidden" not in repr(FULL)
    assert b"worker_auth_token" not in encode_provision(parse())


@contract("FLEET-P2")
@given(st.text(alphabet="aZ09_-./\\\0é ", max_size=12))
def test_name_with_unsafe_characters_or_dots_is_refused(name: str) -> None:
    is_plain = all(one in "aZ09_-." for one in name)
    safe = bool(name) and is_plain and ".." not in name and name[0] != "."
    assert is_safe_name(name) == safe
    if not safe:
        with pytest.raises(UnsafeName):
            check_name(name)


@contract("FLEET-P2")
def test_name_has_at_most_256_characters() -> None:
    assert is_safe_name("a" * 256)
    assert not is_safe_name("a" * 257)
    assert not is_safe_name("a\n")
