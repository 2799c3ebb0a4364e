"""The limit on open files: raised for the server, and as the user set it for commands.

Limits belong to the whole process, and so does the record of the user's own one.
"""

import resource

from culm.errors import Failed

FILES = 16_384  # For connections over both kinds of socket, and the databases.
FILES_MIN = 256  # Databases, sockets and the pipes of some commands at once.

_users: list[int] = []  # The soft limit before it was raised.


class TooFewFiles(Failed):
    code = "too_few_files"


def raise_file_limit() -> None:
    """Raise the soft limit: a shell's default of 1,024 is too low for our own limits.

    Raises `TooFewFiles` if a server cannot work with the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_MIN:
        raise TooFewFiles(
            f"a process may open only {hard} files here; a server needs {FILES_MIN}",
            hint="raise the hard limit (`ulimit -Hn` shows it)",
        )
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _users.append(soft)


def file_limit_of_user() -> int:
    """The soft limit for commands: the user's own, or that of this process if it was not raised."""
    return _users[0] if _users else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
