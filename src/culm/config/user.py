"""The user's own file: the settings of the server in it, and where it is."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from culm.config.checking import ConfigProblem
from culm.config.documents import shown_config
from culm.config.sources import ConfigSource, read_source
from culm.config.trust import TrustedFiles
from culm.errors import InvalidRequest, Rejected
from culm.settings import Settings, default_config_file


def read_user_file(file: Path | None, env: Mapping[str, str]) -> tuple[Settings, Path]:
    """The settings, and the file: `file`, or else the default one, which need not be there.

    Raises `InvalidRequest` that names every problem in it.
    """
    path = (file or default_config_file(env)).absolute()
    read = read_source(ConfigSource(path, "user"), TrustedFiles(path.parent))
    if read is None:
        if file is not None:
            raise InvalidRequest(f"cannot read {path}: there is no such file")
        return Settings(), path
    if read.checked.problems:
        raise _unusable(read.checked.problems)
    try:
        shown_config(read.checked.document, data_directory="", debug=False)
    except Rejected as exc:
        raise InvalidRequest(f"{path}: {exc.message}") from exc
    fields = {
        name: value
        for name, value in read.checked.document.items()
        if name in Settings.__struct_fields__ and value is not None
    }
    return msgspec.convert(fields, Settings), path


def _unusable(problems: tuple[ConfigProblem, ...]) -> InvalidRequest:
    hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
    hint = "; ".join([*hints, "docs/configuration.md lists every key"])
    return InvalidRequest("\n".join(map(str, problems)), hint=hint)
