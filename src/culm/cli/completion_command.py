"""The options of `culm completion`. What it needs is imported when it runs."""

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what lets your shell complete commands, options, and ids of sessions.

    Ids come from the server that runs, if one does and it has this directory open.

    \b
    Example:
      echo 'eval "$(culm completion bash)"' >> ~/.bashrc
      echo 'eval "$(culm completion zsh)"' >> ~/.zshrc
      culm completion fish > ~/.config/fish/completions/culm.fish
    """
    import sys

    from culm.cli.completion import script_for
    from culm.cli.terminal.streams import need_output, write

    need_output()
    write(sys.stdout, script_for(shell, ctx.find_root().command) + "\n")
