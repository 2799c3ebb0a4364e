"""The options of `culm serve`. What it needs is imported when it runs."""

from pathlib import Path

import click


@click.command()
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="URL",
    help="unix:///path or tcp://host:port (0: any); repeatable. Default: your own socket.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where workspaces are stored. Default: $XDG_DATA_HOME/culm, or ~/.local/share/culm.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Bearer token for TCP, made if missing. Default: token in the data directory.",
)
@click.option("--no-auth", is_flag=True, help="Ask for no token on TCP. Loopback only.")
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="A further name in Host headers, for a proxy in front; repeatable.",
)
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False), help="PEM file.")
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="PEM file.")
@click.option(
    "--insecure-plaintext-network",
    is_flag=True,
    help="Listen beyond loopback without TLS, readable for anybody on the way.",
)
@click.option(
    "--linger",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds to stay after the last workspace closed. Default: 60.",
)
@click.option(
    "--create-grace",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds a client has to open its event stream. Default: 30.",
)
@click.option(
    "--detach-grace",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds a client has to come back. Default: 10.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file with models (docs/models.md) and settings (docs/settings.md); options here "
    "win. Default: $XDG_CONFIG_HOME/culm/culm.json, or ~/.config/culm/culm.json.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
)
@click.option("--log-json", is_flag=True, help="One JSON object per log line.")
def serve(
    hosts: tuple[str, ...],
    data_dir: Path | None,
    token_file: Path | None,
    no_auth: bool,  # noqa: FBT001 - click passes by name
    allow_hosts: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure_plaintext_network: bool,  # noqa: FBT001
    linger: float | None,
    create_grace: float | None,
    detach_grace: float | None,
    config_file: Path | None,
    log_level: str,
    log_json: bool,  # noqa: FBT001
) -> None:
    """Run the server until nobody needs it, or until SIGTERM or SIGINT.

    Prints one line `listening URL` per listener when it is ready. Logs go to stderr and to
    $XDG_STATE_HOME/culm/culm.log. Clients over TCP send the token as `Authorization: Bearer`.

    \b
    Exit status:
      0        nobody needed it any more, or it was asked to end and did
      1        it could not start, for example because the address is taken
      2        wrong usage
      128 + n  a second signal n, at least 0.2 s after the first, ended it at once

    \b
    Example:
      culm serve --host tcp://127.0.0.1:7777 --linger 600
    """
    import os

    from culm.cli.serve import run_server
    from culm.config.user import read_user_file
    from culm.logs import set_up_logs
    from culm.settings import (
        ServeOptions,
        default_data_dir,
        default_host,
        default_state_dir,
        settings_with,
    )

    given = {"linger_s": linger, "create_grace_s": create_grace, "detach_grace_s": detach_grace}
    settings, found = read_user_file(config_file, os.environ)
    state_dir = default_state_dir(os.environ)
    options = ServeOptions(
        data_dir=(data_dir or default_data_dir(os.environ)).absolute(),
        hosts=hosts or (default_host(os.environ),),
        token_file=token_file,
        auth=not no_auth,
        allow_hosts=allow_hosts,
        tls_cert=tls_cert,
        tls_key=tls_key,
        plaintext_network=insecure_plaintext_network,
        settings=settings_with(settings, given),
        config_file=found,
    )
    try:
        set_up_logs(state_dir, level=log_level, as_json=log_json)
    except OSError as exc:
        raise click.ClickException(f"cannot write logs to {state_dir}: {exc}") from exc
    run_server(options)
