"""What a client does beside the block that wants it, and no longer than that."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def open_background_task(
    doing: Coroutine[None, None, None], name: str
) -> AsyncGenerator[None]:
    """Do this while in the block.

    What fails there ends the block, and is raised as it is; so is what the block raises. Whoever
    catches `Refused` need not know that there was a group of tasks.
    """
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(doing, name=name)
            try:
                yield
            finally:
                task.cancel()
    except BaseExceptionGroup as exc:
        failed = exc.exceptions[-1]  # The block's own comes last, and first.
    if failed is not None:  # Outside, or the group would be told as its context.
        raise failed
