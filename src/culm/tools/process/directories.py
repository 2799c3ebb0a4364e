"""Where the next command of each session starts, in one workspace.

Kept in memory only: after a restart every session starts in the workspace again.
"""

from culm.tools.files.paths import WorkspacePaths
from culm.tools.files.safe_open import OpenRefused

SESSIONS_MAX = 1000  # Remembered; one that is forgotten starts in the workspace again.


class WorkingDirectories:
    def __init__(self, inside: WorkspacePaths) -> None:
        self._inside = inside
        self._root = str(inside.root)
        self._of_session: dict[str, str] = {}

    def move(self, session_id: str, directory: str) -> bool:
        """Note where a command ended. Outside the workspace it is back to the workspace: False."""
        self._of_session.pop(session_id, None)
        is_inside = self._inside.contains(directory)
        if is_inside and directory != self._root:
            self._of_session[session_id] = directory
            while len(self._of_session) > SESSIONS_MAX:
                del self._of_session[next(iter(self._of_session))]
        return is_inside

    def resolve(self, session_id: str, wanted: str) -> str:
        """The real path of a working directory; raises `Refused`. Blocks as the disk does."""
        here = self._of_session.get(session_id, self._root)
        if not wanted:
            # Somebody may have removed it meanwhile.
            return here if self._is_same(here) else self._root
        path = wanted if wanted.startswith(("/", "~")) else f"{here}/{wanted}"
        target = self._inside.resolve(path)
        if not target.is_directory:
            raise OpenRefused(f"{self._inside.shown(target.path)} is no directory to work in.")
        return target.path

    def check(self, directory: str) -> None:
        """Raise `Refused` unless a real path still leads where it did, through no link."""
        if not self._is_same(directory):
            path = self._inside.shown(directory)
            raise OpenRefused(f"{path} is not the directory any more that it was; nothing was run.")

    def _is_same(self, directory: str) -> bool:
        try:
            target = self._inside.resolve(directory)
        except OpenRefused:
            return False
        return target.is_directory and target.path == directory
