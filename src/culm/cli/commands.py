"""A group of commands as ours are: it offers the nearest, and says which one was misused."""

import click

from culm.cli.terminal.streams import CannotWrite

NEAREST_MAX = 3


class CommandGroup(click.Group):
    """Commands that are offered when somebody mistypes one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            import difflib  # Not needed by whoever types well.

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), NEAREST_MAX, 0.6)
            which = f"; did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"there is no command {args[0]!r}{which}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as exc:
            raise CannotWrite(exc) from exc  # Else click ends us as if something had failed.
        except click.UsageError as exc:
            # One that a command raises by itself does not say whose it is.
            name = ctx.invoked_subcommand
            command = None if name is None else self.get_command(ctx, name)
            if exc.ctx is None and command is not None:
                exc.ctx = click.Context(command, ctx, info_name=name)
            raise
