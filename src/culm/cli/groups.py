"""Click groups of `culm`: one that suggests the nearest command, and one that loads on use."""

from importlib import import_module
from typing import TYPE_CHECKING

import click

from culm.cli.terminal.process import CannotWrite

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

NEAREST_MAX = 3


class CommandGroup(click.Group):
    """A group that suggests the nearest commands for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            import difflib  # Only a mistyped command needs it.

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), NEAREST_MAX, 0.6)
            which = f"; did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"unknown command {args[0]!r}{which}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as exc:
            raise CannotWrite(exc) from exc  # Otherwise click exits with the status of a failure.
        except click.UsageError as exc:
            # An error that the command itself raises does not carry its context.
            name = ctx.invoked_subcommand
            command = None if name is None else self.get_command(ctx, name)
            if exc.ctx is None and command is not None:
                exc.ctx = click.Context(command, ctx, info_name=name)
            raise


class LazyCommand(click.Command):
    """The name and the short help of a command whose module is imported when it is used.

    The short help is the first sentence of the command's help, so that listing the commands
    imports none of them.
    """

    def __init__(self, name: str, module: str, attribute: str, short_help: str) -> None:
        super().__init__(name, help=short_help)
        self._module = module
        self._attribute = attribute

    def load(self) -> click.Command:
        command = getattr(import_module(self._module), self._attribute)
        assert isinstance(command, click.Command), f"{self._module}.{self._attribute}"
        return command


class LazyGroup(CommandGroup):
    """A group of `LazyCommand`s; its help and its shell completion import none of them."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        return found.load() if isinstance(found, LazyCommand) else found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        click.Group(commands=self.commands).format_commands(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem  # As in click: only Tab needs it.

        found = [
            CompletionItem(name, help=self.commands[name].get_short_help_str())
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]
