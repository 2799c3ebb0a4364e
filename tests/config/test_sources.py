"""Configuration files: which are read, which content of each is used, and the notices."""

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
    TrustedFiles,
    read_source,
    read_user_file,
    sources_of,
)
from culm.errors import InvalidRequest
from culm.settings import Settings

BELL: Document = {"options": {"notifications": "bell"}}
OWN: Document = {"providers": {"own": {"base_url": "http://own/v1"}}}
CHOICE: Document = {"models": {"large": {"model": "m", "provider": "own"}}}


class ConfigFiles:
    """A user and a project, each with its own configuration files."""

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
def files(tmp_path: Path) -> ConfigFiles:
    return ConfigFiles(tmp_path)


def ignored(file: Path, keys: str) -> str:
    return (
        f"{file} is not trusted, so this part of it is ignored: {keys}. "
        "Read it, then run: culm trust"
    )


def fixed(file: Path, message: str = "it is ignored") -> str:
    return f"{file} has errors; until they are fixed, {message}"


LAST_VALID = "its last valid content is used"


# --- which files


def test_the_user_file_is_lowest_and_culm_files_override_crush_files(tmp_path: Path) -> None:
    user = tmp_path / "u.json"
    project = [ConfigSource(tmp_path / name, "project") for name in PROJECT_FILES]
    assert PROJECT_FILES == (".crush.json", "crush.json", ".culm.json", "culm.json")
    assert sources_of(user, tmp_path) == (ConfigSource(user, "user"), *project)
    assert sources_of(None, None) == ()


async def test_missing_files_give_an_empty_configuration(files: ConfigFiles) -> None:
    assert await files.load() == LoadedConfig()
    assert await FileSources(None, files.project, files.trusted).load(()) == LoadedConfig()


async def test_files_are_read_in_their_order(files: ConfigFiles) -> None:
    files.user.write_text('{"options": {"progress": true}, "linger_s": 5}')
    for n, name in enumerate(reversed(PROJECT_FILES)):
        files.write(f'{{"options": {{"notifications": "{n}"}}}}', name)
    assert await files.load() == LoadedConfig(
        {"options": {"progress": True}, "linger_s": 5},
        tuple({"options": {"notifications": f"{n}"}} for n in (3, 2, 1, 0)),
    )


async def test_fixed_sources_never_change() -> None:
    fixed = FixedSources(OWN)
    assert (await fixed.load(()), await fixed.changed()) == (LoadedConfig(OWN), False)


# --- trust


async def test_an_untrusted_file_may_choose_known_providers_and_the_rest_is_ignored(
    files: ConfigFiles,
) -> None:
    files.user.write_text('{"providers": {"own": {"base_url": "http://own/v1"}}}')
    text = '{"models": {"large": {"model": "m", "provider": "%s"}}, "env": {"A": "a"}}'
    for provider in ("own", "found"):
        file = files.write(text % provider)
        chosen = {"models": {"large": {"model": "m", "provider": provider}}}
        loaded = await files.load("found")
        assert loaded == LoadedConfig(OWN, (chosen,), (ignored(file, "env"),))
    file = files.write(text % "theirs")
    assert await files.load("found") == LoadedConfig(OWN, ({},), (ignored(file, "env, models"),))


async def test_trust_applies_at_the_next_load_and_ends_with_any_changed_byte(
    files: ConfigFiles,
) -> None:
    text = '{"providers": {"own": {"base_url": "http://own/v1"}}}'
    file = files.write(text)
    needs_trust = LoadedConfig({}, ({},), (ignored(file, "providers"),))
    assert await files.load() == needs_trust
    files.trust(file)
    assert await files.sources.changed()
    assert await files.load() == LoadedConfig({}, (OWN,))
    file.write_text(text + " ")
    assert await files.load() == needs_trust
    file.write_text(text)
    assert await files.load() == LoadedConfig({}, (OWN,))
    files.trusted.remove([file])
    assert await files.sources.changed()
    assert await files.load() == needs_trust


async def test_an_untrusted_file_may_choose_a_provider_of_a_trusted_file(
    files: ConfigFiles,
) -> None:
    """The provider of a trusted file is available; naming another one is still refused."""
    lower = files.write('{"providers": {"own": {"base_url": "http://own/v1"}}}', "crush.json")
    files.write('{"models": {"large": {"model": "m", "provider": "own"}}}')
    files.trust(lower)
    assert await files.load() == LoadedConfig({}, (OWN, CHOICE))


async def test_trust_in_a_symlink_covers_only_the_content_of_its_target(
    files: ConfigFiles, tmp_path: Path
) -> None:
    (tmp_path / "one").write_text('{"env": {"A": "1"}}')
    (tmp_path / "two").write_text('{"env": {"A": "2"}}')
    file = files.project / "culm.json"
    file.symlink_to(tmp_path / "one")
    files.trust(file)
    assert await files.load() == LoadedConfig({}, ({"env": {"A": "1"}},))
    file.unlink()
    file.symlink_to(tmp_path / "two")
    assert await files.sources.changed()
    assert await files.load() == LoadedConfig({}, ({},), (ignored(file, "env"),))


async def test_the_last_valid_content_is_used_only_while_it_is_trusted(
    files: ConfigFiles,
) -> None:
    file = files.write('{"env": {"A": "1"}}')
    files.trust(file)
    good = await files.load()
    file.write_text('{"env":')
    retained = await files.load()
    assert (retained.project, retained.notices[-1]) == (good.project, fixed(file, LAST_VALID))
    files.trusted.remove([file])
    untrusted = await files.load()
    assert untrusted.project == ({},)
    assert untrusted.notices[-1] == ignored(file, "env")


async def test_a_broken_file_that_is_trusted_is_ignored(files: ConfigFiles) -> None:
    file = files.write('{"env": {"A": "1"}, "envy": {}}')
    files.trust(file)
    loaded = await files.load()
    assert loaded.project == ()
    assert loaded.notices[-1] == fixed(file)


# --- invalid files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n"options": 1}', ":2: options: expected an object, got a number"),
        (b'{\n"optoins": {}}', ":2: optoins: unknown key (did you mean 'options'?)"),
        (b'{}\n\n"\xff"', ":3: it is not UTF-8"),
        (b"[]", ":1: expected a JSON object"),
        (
            b"{" + b" " * FILE_BYTES_MAX,
            f": cannot be read: it has more than {FILE_BYTES_MAX} bytes",
        ),
    ],
    ids=["kind", "key", "bytes", "no object", "size"],
)
async def test_an_invalid_file_is_reported_and_its_last_valid_content_is_used(
    files: ConfigFiles, content: bytes, message: str
) -> None:
    file = files.project / "culm.json"
    file.write_bytes(content)
    assert await files.load() == LoadedConfig({}, (), (f"{file}{message}", fixed(file)))
    files.write('{"options": {"notifications": "bell"}}')
    assert await files.load() == LoadedConfig({}, (BELL,))
    file.write_bytes(content)
    assert await files.load() == LoadedConfig(
        {}, (BELL,), (f"{file}{message}", fixed(file, LAST_VALID))
    )
    file.unlink()
    assert await files.load() == LoadedConfig()
    file.write_bytes(content)  # The file was missing: its last valid content is forgotten.
    assert await files.load() == LoadedConfig({}, (), (f"{file}{message}", fixed(file)))


async def test_an_invalid_user_file_keeps_its_last_valid_content(files: ConfigFiles) -> None:
    files.user.write_text('{"providers": {"own": {"base_url": "http://own/v1"}}}')
    files.write('{"models": {"large": {"model": "m", "provider": "own"}}}')
    assert await files.load() == LoadedConfig(OWN, (CHOICE,))
    files.user.write_text("{")
    loaded = await files.load()
    assert (loaded.user, loaded.project) == (OWN, (CHOICE,))
    assert loaded.notices[-1] == fixed(files.user, LAST_VALID)


@pytest.mark.parametrize("kind", ["pipe", "folder", "circle"])
async def test_a_path_that_is_not_a_regular_file_is_reported_without_blocking(
    files: ConfigFiles, kind: str
) -> None:
    file = files.project / "culm.json"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case _:
            file.symlink_to(file)
    files.write('{"options": {"notifications": "bell"}}', "crush.json")
    loaded = await files.load()
    assert loaded.project == (BELL,)
    assert loaded.notices[0].startswith(f"{file}: cannot be read: ")
    assert loaded.notices[1:] == (fixed(file),)


async def test_a_byte_order_mark_is_accepted(files: ConfigFiles) -> None:
    files.write('\ufeff{"options": {"notifications": "bell"}}')
    assert await files.load() == LoadedConfig({}, (BELL,))


async def test_unknown_crush_keys_are_reported_and_the_rest_is_used(
    files: ConfigFiles,
) -> None:
    text = '{"options": {"notifications": "bell", "sparkle": 1}, "nextBigThing": {}}'
    file = files.write(text, ".crush.json")
    loaded = await files.load()
    assert loaded.project == (BELL,)
    assert [notice.partition(": unknown key")[0] for notice in loaded.notices] == [
        f"{file}:1: options.sparkle",
        f"{file}:1: nextBigThing",
    ]
    files.write("{", ".crush.json")
    assert (await files.load()).project == (BELL,)


# --- changes


async def test_a_change_of_any_file_or_of_trust_is_detected_once(
    files: ConfigFiles,
) -> None:
    await files.load()
    assert not await files.sources.changed()

    def replace_file() -> None:
        """Replace the file by another of the same size and time."""
        file, old = files.project / "culm.json", (files.project / "culm.json").stat()
        other = files.write('{"a": 2}', "other")
        os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
        other.replace(file)

    steps = [
        lambda: files.user.write_text("{}"),
        lambda: files.write('{"a": 1}'),
        replace_file,
        lambda: files.write("{}", ".crush.json"),
        lambda: (files.project / ".crush.json").chmod(0o600),
        lambda: (files.project / ".crush.json").unlink(),
        lambda: files.trusted.add({files.user: b""}),
    ]
    for step in steps:
        step()
        assert await files.sources.changed()
        await files.load()
        assert not await files.sources.changed()


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


# --- the user file at server start


def test_without_a_user_file_the_defaults_and_its_path_are_returned(tmp_path: Path) -> None:
    expected = tmp_path / "culm" / "culm.json"
    assert read_user_file(None, {"XDG_CONFIG_HOME": str(tmp_path)}) == (Settings(), expected)


def test_settings_are_read_from_the_user_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"LINGER_S": 1, "runs_max": 3, "queue_max": null, // mine\n "providers": {},}')
    assert read_user_file(file, {}) == (Settings(linger_s=1.0, runs_max=3), file)


def test_the_user_file_path_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text("{}")
    assert read_user_file(Path("mine.json"), {}) == (Settings(), tmp_path / "mine.json")


def test_a_named_user_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_user_file(tmp_path / "none.json", {})
    assert caught.value.message == f"cannot read {tmp_path}/none.json: no such file"


def test_all_problems_are_reported_at_once_and_each_hint_once(tmp_path: Path) -> None:
    file = tmp_path / "culm.json"
    file.write_text('{\n"runs_mx": 1,\n"models": {"larg": {}},\n"fallbacks": {"larg": []}\n}')
    with pytest.raises(InvalidRequest) as caught:
        read_user_file(file, {})
    assert (caught.value.message, caught.value.hint) == (
        f"{file}:2: runs_mx: unknown key\n"
        f"{file}:3: models.larg: unknown key\n"
        f"{file}:4: fallbacks.larg: unknown key",
        "did you mean 'runs_max'?; did you mean 'large'?; docs/configuration.md lists every key",
    )


@pytest.mark.parametrize("content", [b"\xff", b"", b"[]", b'{"linger_s": 1e999}'])
def test_an_invalid_user_file_is_refused_at_start(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "culm.json"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"culm\.json:1: "):
        read_user_file(file, {})


def test_a_directory_in_place_of_the_user_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_user_file(tmp_path, {})
