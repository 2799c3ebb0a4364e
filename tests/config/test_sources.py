"""The files that people write: which there are, which content of each counts, and what is told."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from culm.config.checking import Document
from culm.config.sources import (
    FILE_BYTES_MAX,
    PROJECT_FILES,
    ConfigSource,
    FileSources,
    FixedSources,
    LoadedConfig,
    read_source,
    sources_of,
)
from culm.config.trust import TrustedFiles

BELL: Document = {"options": {"notifications": "bell"}}
OWN: Document = {"providers": {"own": {"base_url": "http://own/v1"}}}
CHOICE: Document = {"models": {"large": {"model": "m", "provider": "own"}}}


class Place:
    """A user and a project, each with files of their own."""

    def __init__(self, folder: Path) -> None:
        self.user = folder / "user" / "culm.json"
        self.project = folder / "project"
        self.user.parent.mkdir()
        self.project.mkdir()
        self.trusted = TrustedFiles(folder / "data")
        self.sources = FileSources(self.user, self.project, self.trusted)

    def write(self, text: str, name: str = "culm.json") -> Path:
        file = self.project / name
        file.write_text(text)
        return file

    def trust(self, file: Path) -> None:
        self.trusted.add({file: file.read_bytes()})

    async def load(self, *providers: str) -> LoadedConfig:
        return await self.sources.load(providers)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def ignored(file: Path, keys: str) -> str:
    return (
        f"{file} is not trusted, so this part of it is ignored: {keys}. "
        "Read it, then say: culm trust"
    )


def fixed(file: Path, what: str = "nothing in it counts") -> str:
    return f"{file} is to be mended; until then {what}"


BEFORE = "it counts as it was before"


# --- which files


def test_the_users_file_is_lowest_and_culm_lies_over_crush(tmp_path: Path) -> None:
    user = tmp_path / "u.json"
    project = [ConfigSource(tmp_path / name, "project") for name in PROJECT_FILES]
    assert PROJECT_FILES == (".crush.json", "crush.json", ".culm.json", "culm.json")
    assert sources_of(user, tmp_path) == (ConfigSource(user, "user"), *project)
    assert sources_of(None, None) == ()


async def test_nothing_there_says_nothing(place: Place) -> None:
    assert await place.load() == LoadedConfig()
    assert await FileSources(None, place.project, place.trusted).load(()) == LoadedConfig()


async def test_files_are_read_in_their_order(place: Place) -> None:
    place.user.write_text('{"options": {"progress": true}, "linger_s": 5}')
    for n, name in enumerate(reversed(PROJECT_FILES)):
        place.write(f'{{"options": {{"notifications": "{n}"}}}}', name)
    assert await place.load() == LoadedConfig(
        {"options": {"progress": True}, "linger_s": 5},
        tuple({"options": {"notifications": f"{n}"}} for n in (3, 2, 1, 0)),
    )


async def test_what_was_said_once_and_for_all_does_not_change() -> None:
    fixed = FixedSources(OWN)
    assert (await fixed.load(()), await fixed.changed()) == (LoadedConfig(OWN), False)


# --- trust


async def test_an_untrusted_file_chooses_among_what_the_user_has_and_the_rest_is_told(
    place: Place,
) -> None:
    place.user.write_text('{"providers": {"own": {"base_url": "http://own/v1"}}}')
    text = '{"models": {"large": {"model": "m", "provider": "%s"}}, "env": {"A": "a"}}'
    for provider in ("own", "found"):
        file = place.write(text % provider)
        chosen = {"models": {"large": {"model": "m", "provider": provider}}}
        loaded = await place.load("found")
        assert loaded == LoadedConfig(OWN, (chosen,), (ignored(file, "env"),))
    file = place.write(text % "theirs")
    assert await place.load("found") == LoadedConfig(OWN, ({},), (ignored(file, "env, models"),))


async def test_trust_counts_from_the_next_reading_and_ends_with_one_changed_byte(
    place: Place,
) -> None:
    text = '{"providers": {"own": {"base_url": "http://own/v1"}}}'
    file = place.write(text)
    needs_trust = LoadedConfig({}, ({},), (ignored(file, "providers"),))
    assert await place.load() == needs_trust
    place.trust(file)
    assert await place.sources.changed()
    assert await place.load() == LoadedConfig({}, (OWN,))
    file.write_text(text + " ")
    assert await place.load() == needs_trust
    file.write_text(text)
    assert await place.load() == LoadedConfig({}, (OWN,))
    place.trusted.remove([file])
    assert await place.sources.changed()
    assert await place.load() == needs_trust


async def test_what_a_trusted_file_provides_an_untrusted_one_may_choose(place: Place) -> None:
    """Whoever trusted the file has that provider now; naming another one is still refused."""
    lower = place.write('{"providers": {"own": {"base_url": "http://own/v1"}}}', "crush.json")
    place.write('{"models": {"large": {"model": "m", "provider": "own"}}}')
    place.trust(lower)
    assert await place.load() == LoadedConfig({}, (OWN, CHOICE))


async def test_a_link_is_trusted_by_what_it_leads_to(place: Place, tmp_path: Path) -> None:
    (tmp_path / "one").write_text('{"env": {"A": "1"}}')
    (tmp_path / "two").write_text('{"env": {"A": "2"}}')
    file = place.project / "culm.json"
    file.symlink_to(tmp_path / "one")
    place.trust(file)
    assert await place.load() == LoadedConfig({}, ({"env": {"A": "1"}},))
    file.unlink()
    file.symlink_to(tmp_path / "two")
    assert await place.sources.changed()
    assert await place.load() == LoadedConfig({}, ({},), (ignored(file, "env"),))


async def test_the_last_good_content_counts_only_as_long_as_that_content_is_trusted(
    place: Place,
) -> None:
    file = place.write('{"env": {"A": "1"}}')
    place.trust(file)
    good = await place.load()
    file.write_text('{"env":')
    kept = await place.load()
    assert (kept.project, kept.notices[-1]) == (good.project, fixed(file, BEFORE))
    place.trusted.remove([file])
    taken_back = await place.load()
    assert taken_back.project == ({},)
    assert taken_back.notices[-1] == ignored(file, "env")


async def test_a_broken_content_that_is_trusted_makes_nothing_of_it_count(place: Place) -> None:
    file = place.write('{"env": {"A": "1"}, "envy": {}}')
    place.trust(file)
    loaded = await place.load()
    assert loaded.project == ()
    assert loaded.notices[-1] == fixed(file)


# --- files that are wrong


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{\n"options": 1}', ":2: options: an object is wanted, not a number"),
        (b'{\n"optoins": {}}', ":2: optoins: unknown key (did you mean 'options'?)"),
        (b'{}\n\n"\xff"', ":3: it is not UTF-8"),
        (b"[]", ":1: a JSON object is wanted"),
        (
            b"{" + b" " * FILE_BYTES_MAX,
            f": cannot be read: it has more than {FILE_BYTES_MAX} bytes",
        ),
    ],
    ids=["kind", "key", "bytes", "no object", "size"],
)
async def test_a_bad_file_is_told_and_counts_as_it_was_before(
    place: Place, content: bytes, what: str
) -> None:
    file = place.project / "culm.json"
    file.write_bytes(content)
    assert await place.load() == LoadedConfig({}, (), (f"{file}{what}", fixed(file)))
    place.write('{"options": {"notifications": "bell"}}')
    assert await place.load() == LoadedConfig({}, (BELL,))
    file.write_bytes(content)
    assert await place.load() == LoadedConfig({}, (BELL,), (f"{file}{what}", fixed(file, BEFORE)))
    file.unlink()
    assert await place.load() == LoadedConfig()
    file.write_bytes(content)  # It has been away: what it once said is forgotten.
    assert await place.load() == LoadedConfig({}, (), (f"{file}{what}", fixed(file)))


async def test_a_bad_file_of_the_user_counts_as_it_was_before_too(place: Place) -> None:
    place.user.write_text('{"providers": {"own": {"base_url": "http://own/v1"}}}')
    place.write('{"models": {"large": {"model": "m", "provider": "own"}}}')
    assert await place.load() == LoadedConfig(OWN, (CHOICE,))
    place.user.write_text("{")
    loaded = await place.load()
    assert (loaded.user, loaded.project) == (OWN, (CHOICE,))
    assert loaded.notices[-1] == fixed(place.user, BEFORE)


@pytest.mark.parametrize("kind", ["pipe", "folder", "circle"])
async def test_what_is_no_file_is_told_and_does_not_keep_anybody_waiting(
    place: Place, kind: str
) -> None:
    file = place.project / "culm.json"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case _:
            file.symlink_to(file)
    place.write('{"options": {"notifications": "bell"}}', "crush.json")
    loaded = await place.load()
    assert loaded.project == (BELL,)
    assert loaded.notices[0].startswith(f"{file}: cannot be read: ")
    assert loaded.notices[1:] == (fixed(file),)


async def test_a_byte_order_mark_is_no_trouble(place: Place) -> None:
    place.write('\ufeff{"options": {"notifications": "bell"}}')
    assert await place.load() == LoadedConfig({}, (BELL,))


async def test_keys_of_crush_that_nobody_here_knows_are_told_and_spoil_nothing(
    place: Place,
) -> None:
    text = '{"options": {"notifications": "bell", "sparkle": 1}, "nextBigThing": {}}'
    file = place.write(text, ".crush.json")
    loaded = await place.load()
    assert loaded.project == (BELL,)
    assert [notice.partition(": unknown key")[0] for notice in loaded.notices] == [
        f"{file}:1: options.sparkle",
        f"{file}:1: nextBigThing",
    ]
    place.write("{", ".crush.json")
    assert (await place.load()).project == (BELL,)


# --- changes


async def test_a_change_of_any_file_or_of_the_trust_is_seen_and_then_seen_no_more(
    place: Place,
) -> None:
    await place.load()
    assert not await place.sources.changed()

    def remade() -> None:
        """Another file in its place, with the same size and time."""
        file, old = place.project / "culm.json", (place.project / "culm.json").stat()
        other = place.write('{"a": 2}', "other")
        os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
        other.replace(file)

    steps = [
        lambda: place.user.write_text("{}"),
        lambda: place.write('{"a": 1}'),
        remade,
        lambda: place.write("{}", ".crush.json"),
        lambda: (place.project / ".crush.json").chmod(0o600),
        lambda: (place.project / ".crush.json").unlink(),
        lambda: place.trusted.add({place.user: b""}),
    ]
    for step in steps:
        step()
        assert await place.sources.changed()
        await place.load()
        assert not await place.sources.changed()


def test_a_file_is_trusted_by_its_owner_or_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "culm.json"
    file.write_text("{}")
    trusted = TrustedFiles(tmp_path / "data")
    assert read_source(ConfigSource(tmp_path / "none", "user"), trusted) is None

    def found() -> Mapping[str, bool]:
        reads = {
            owner: read_source(ConfigSource(file, owner), trusted) for owner in ("user", "project")
        }
        return {owner: read is not None and read.trusted for owner, read in reads.items()}

    assert found() == {"user": True, "project": False}
    trusted.add({file: b"{}"})
    assert found() == {"user": True, "project": True}
