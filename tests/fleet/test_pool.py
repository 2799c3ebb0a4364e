"""Worker fingerprints, and which idle workers are taken, kept and retired."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, structs

from culm.fleet.host.pool import ParkedWorker, PoolBounds, check_out, fingerprint, park, sweep
from culm.fleet.provision import (
    Bus,
    Capabilities,
    CliKind,
    Credential,
    CulmExtension,
    EchoKind,
    Identity,
    ModelName,
    OwnerStamp,
    Provision,
    ProvisionContext,
    ProvisionLimits,
    RemotePlacement,
    Secrets,
)
from culm.wire.codec import Json
from tests.support import contract

# --- fingerprints

KEY = Credential("demo", "key-1", base_url="http://here", provider_type="openai")
ONE = Provision(
    2,
    Identity("a", "root", "project", "reviewer", 1),
    EchoKind(),
    "/fabric",
    owner=OwnerStamp(1, "instance", "now"),
    disabled_tools=["bash", "edit"],
    secrets=Secrets([KEY], "token"),
    culm=CulmExtension(control_fd=3, env={"A": "1", "B": "2"}),
)
# Identity, owner, connection details, and the order of unordered values.
LIKE_ONE: list[tuple[str, Json]] = [
    ("identity.child_id", "b"),
    ("identity.parent_id", None),
    ("owner", None),
    ("secrets.worker_auth_token", "another"),
    ("culm.control_fd", None),
    ("disabled_tools", ["edit", "bash", "edit"]),
    ("culm.env", {"B": "2", "A": "1"}),
]
UNLIKE_ONE: list[tuple[str, Json]] = [
    ("version", 3),
    ("identity.project_key", None),
    ("identity.role", "writer"),
    ("identity.depth", 2),
    ("executor", CliKind("agent", ["--json"])),
    ("executor", CliKind("agent", ["--text"])),
    ("fabric_dir", "/elsewhere"),
    ("bus", Bus("ws://bus", "token")),
    ("storage_dir", "/storage"),
    ("workspace", "/workspace"),
    ("model", ModelName("demo", "small")),
    ("model", ModelName("demo", "large")),
    ("disabled_tools", ["bash"]),
    ("disabled_tools", None),
    ("limits.run_timeout_secs", 60.0),
    ("limits.idle_timeout_secs", 60.0),
    ("limits.max_rounds", 3),
    ("secrets.provider_credentials", []),
    ("secrets.provider_credentials", [structs.replace(KEY, api_key="key-2")]),
    ("secrets.provider_credentials", [structs.replace(KEY, base_url="http://there")]),
    ("reusable", True),
    ("placement", RemotePlacement("ws://there")),
    *((f"capabilities.{name}", True) for name in Capabilities.__struct_fields__),
    ("culm.host_calls", True),
    ("culm.env", {"A": "1"}),
    ("culm.rules", {"allow": ["view"]}),
    ("culm.rules", {"allow": []}),
    ("culm.rules_also_from", ["/workspace"]),
    ("culm.prompt", "You only look."),
    ("culm.roles", "linter: lints"),
    ("culm.chosen", ["demo", {}, {}, {"api_key": "key-1"}, False]),
    ("culm.questions", True),
    ("culm.ask_s", 5.0),
    ("culm.approve", "deny"),
    ("culm.hooks", [{"command": "true"}]),
    ("culm.own_tools", {"greet": {"command": "true", "description": "Greets."}}),
    ("culm.allowed_tools", ["bash"]),
    ("culm.context_paths", ProvisionContext(["RULES.md"])),
    ("culm.compacts", False),
]


def with_value(document: Provision, path: str, value: Json) -> Provision:
    name, _, inner = path.partition(".")
    if inner:
        value = structs.replace(getattr(document, name), **{inner: value})
    return structs.replace(document, **{name: value})


@contract("FLEET-93")
def test_fingerprint_ignores_the_identity_of_the_child() -> None:
    assert {fingerprint(with_value(ONE, *other)) for other in LIKE_ONE} == {fingerprint(ONE)}


@contract("FLEET-93")
def test_fingerprint_covers_all_settings_and_reveals_no_secret() -> None:
    others = [with_value(ONE, *other) for other in UNLIKE_ONE]
    prints = [fingerprint(other) for other in others]
    assert len({fingerprint(ONE), *prints}) == len(prints) + 1
    assert "key-1" not in "".join(prints)


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("", Provision),
        ("identity.", Identity),
        ("limits.", ProvisionLimits),
        ("secrets.", Secrets),
        ("capabilities.", Capabilities),
        ("culm.", CulmExtension),
    ],
)
def test_every_provision_field_is_covered_by_these_tests(prefix: str, kind: type[Struct]) -> None:
    known = {path for path, _ in (*LIKE_ONE, *UNLIKE_ONE)}
    tops = {path.partition(".")[0] for path in known}
    assert {f"{prefix}{name}" for name in kind.__struct_fields__} <= known | tops


# --- the pool


@dataclass(eq=False)
class FakeWorker:
    name: str
    is_alive: bool = True

    def __repr__(self) -> str:
        return self.name


def parked(name: str, key: str = "k", until_s: float = 300.0) -> ParkedWorker[FakeWorker]:
    return ParkedWorker(FakeWorker(name), key, until_s)


def test_newest_matching_worker_is_chosen_and_dead_or_expired_ones_go() -> None:
    old, dead, first, second, other = idle = (
        parked("old", until_s=10.0),
        parked("dead"),
        parked("first"),
        parked("second"),
        parked("other", key="o"),
    )
    dead.worker.is_alive = False
    decided = check_out(idle, "k", 10.0)
    assert decided.chosen is second.worker
    assert decided.idle == (first, other)
    assert decided.retired == (old.worker, dead.worker)
    assert check_out(decided.idle, "missing", 10.0).chosen is None


@contract("FLEET-99")
def test_oldest_worker_is_retired_when_the_pool_is_full() -> None:
    bounds = PoolBounds(idle_per_key_max=2, idle_max=3)
    a, b, c, d = parked("a"), parked("b"), parked("c", key="o"), parked("d")
    decided = park((a, b, c), d, bounds, 0.0)
    assert (decided.idle, decided.retired) == ((b, c, d), (a.worker,))
    e = parked("e", key="p")
    decided = park((b, c, d), e, bounds, 0.0)
    assert (decided.idle, decided.retired) == ((c, d, e), (b.worker,))


def test_worker_that_died_at_the_end_of_its_run_is_not_pooled() -> None:
    dead = parked("dead")
    dead.worker.is_alive = False
    decided = park((), dead, PoolBounds(), 0.0)
    assert (decided.idle, decided.retired) == ((), (dead.worker,))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "end", "fail", "die", "sweep"]),
        st.integers(0, 2),  # Index of the key, the busy worker or the idle worker.
        st.integers(0, 5),  # Seconds that pass.
    ),
    max_size=60,
)


@contract("FLEET-99")
@given(STEPS)
def test_every_worker_is_busy_idle_or_retired_within_bounds(
    steps: list[tuple[str, int, int]],
) -> None:
    bounds = PoolBounds(idle_per_key_max=2, idle_max=4, idle_s=8.0)
    idle: tuple[ParkedWorker[FakeWorker], ...] = ()
    busy: list[tuple[str, FakeWorker]] = []
    retired: list[FakeWorker] = []
    launched: list[FakeWorker] = []
    now_s = 0.0
    for step, which, seconds in steps:
        now_s += seconds
        before = idle
        match step:
            case "start":
                key = "xyz"[which]
                decided = check_out(idle, key, now_s)
                idle, worker = decided.idle, decided.chosen
                retired += decided.retired
                if worker is None:
                    assert not any(p.key == key and p.worker.is_alive for p in idle)
                    worker = FakeWorker(f"{len(launched)}")
                    launched.append(worker)
                else:
                    was = next(p for p in before if p.worker is worker)
                    assert (was.key, worker.is_alive, now_s < was.until_s) == (key, True, True)
                busy.append((key, worker))
            case "end" if busy:
                key, worker = busy.pop(which % len(busy))
                decided = park(
                    idle, ParkedWorker(worker, key, now_s + bounds.idle_s), bounds, now_s
                )
                idle = decided.idle
                retired += decided.retired
            case "fail" if busy:
                retired.append(busy.pop(which % len(busy))[1])
            case "die" if idle:
                idle[which % len(idle)].worker.is_alive = False
            case _:
                decided = sweep(idle, now_s)
                idle = decided.idle
                retired += decided.retired
                assert all(p.worker.is_alive and now_s < p.until_s for p in idle)
        all_workers = [*(p.worker for p in idle), *(w for _, w in busy), *retired]
        assert Counter(all_workers) == Counter(launched)
        assert len(idle) <= bounds.idle_max
        per_key = Counter(p.key for p in idle).values()
        assert max(per_key, default=0) <= bounds.idle_per_key_max
