"""`calib app`: starts the dashboard of `app/` on Streamlit, loads the store meanwhile, and keeps it on this machine.

No usage statistics, no request to anywhere: fonts and scripts are served from here. On loopback by default; elsewhere
only with a token, which a named environment variable holds.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from calib import resources
from calib.errors import CalibError

__all__ = ["LOOPBACK", "Settings", "is_loopback", "run_app"]

LOOPBACK = "127.0.0.1"
_PREFIX = "CALIB_APP_"
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Settings:
    """What the command line says to the pages.

    Attributes
    ----------
    store : str
        Where the store is.
    config_dir : str or None
        Folder below which configs may be written; None: nowhere.
    read_only : bool
        Whether nothing may be written at all, the ledger of looks included.
    token_env : str or None
        Environment variable that holds the token that a visitor must give.
    """

    store: str
    config_dir: str | None = None
    read_only: bool = False
    token_env: str | None = None

    def to_environment(self) -> dict[str, str]:
        """As environment variables; the token itself is not among them."""
        found = {"STORE": self.store, "CONFIG_DIR": self.config_dir, "TOKEN_ENV": self.token_env}
        named = {_PREFIX + name: value for name, value in found.items() if value is not None}
        return named | ({_PREFIX + "READ_ONLY": "1"} if self.read_only else {})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """What `to_environment` wrote; without it the store of CALIB_STORE, else ``calib.db``."""
        return cls(
            environment.get(_PREFIX + "STORE") or environment.get("CALIB_STORE") or "calib.db",
            environment.get(_PREFIX + "CONFIG_DIR"),
            environment.get(_PREFIX + "READ_ONLY") == "1",
            environment.get(_PREFIX + "TOKEN_ENV"),
        )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def run_app(
    store: str,
    port: int = 8501,
    config_dir: str | None = None,
    read_only: bool = False,
    host: str = LOOPBACK,
    token_env: str | None = None,
) -> None:
    """Serve the dashboard until it is interrupted.

    Parameters
    ----------
    store : str
        File or database URL.
    port : int, default 8501
        0 takes a free one.
    config_dir : str, optional
        Folder below which the page may write serve configs; it writes none without.
    read_only : bool, default False
        Hide all that writes.
    host : str, default 127.0.0.1
        Address to listen on.
    token_env : str, optional
        Environment variable that holds a token; needed off loopback.

    Raises
    ------
    CalibError
        An address off loopback without a token, a variable that is empty, a port that is taken.
    """
    if token_env is None and not is_loopback(host):
        raise CalibError(
            f"--host {host} can be reached from other machines, so visitors must give a token: put one in an "
            "environment variable and name it, for instance: --token-env CALIB_APP_TOKEN"
        )
    if token_env is not None and not os.environ.get(token_env):
        raise CalibError(f"--token-env {token_env}: this variable is empty; set it first: export {token_env}=...")
    script = resources.find("app/streamlit_app.py")
    port = _free_port(host, port)
    settings = Settings(store, config_dir, read_only, token_env)
    os.environ.update(settings.to_environment())

    from streamlit import net_util
    from streamlit.web import bootstrap

    # asked when a page comes from an unknown origin, it would look up this machine's address on the internet
    net_util.get_external_ip = lambda: None
    options = _options(host, port)
    bootstrap.load_config_options(options)
    click.echo(f"calib: reading {_without_login(store)} ...", err=True)
    loading = threading.Thread(target=_load_ahead, args=(settings,), daemon=True)
    loading.start()
    threading.Thread(target=_announce, args=(host, port, settings, loading), daemon=True).start()
    bootstrap.run(str(script), False, [], options)


def _options(host: str, port: int) -> dict[str, Any]:
    """Streamlit's options, which go before those of any config file."""
    return {
        "global_developmentMode": False,
        "server_address": host,
        "server_port": port,
        "server_headless": True,
        "server_fileWatcherType": "none",
        "server_runOnSave": False,
        "browser_gatherUsageStats": False,
        "client_toolbarMode": "viewer",
        "client_showErrorDetails": "type",
        "client_showErrorLinks": False,
        "logger_level": "warning",
        "runner_magicEnabled": False,  # a text alone on a line is a comment, not output
        "logger_hideWelcomeMessage": True,
        # blue and not red: red says that something is wrong
        "theme_light_primaryColor": "#0b62a8",
        "theme_dark_primaryColor": "#5aa9e6",
    }


def _free_port(host: str, port: int) -> int:
    """The port, or a free one for 0; refused when something listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise CalibError(
            f"cannot listen on {host}, port {port} ({error.strerror or error}); choose another: --port 0", exit_code=1
        ) from None


def _load_ahead(settings: Settings) -> None:
    """Read the store while the server starts, so that the first visitor does not wait for it."""
    import importlib

    from calib import workspace

    # what the pages import: a second of its own
    for module in (
        "calib.figures",
        "calib.appraise",
        "calib.export",
        "calib.saved",
        "calib.trials",
        "pandas",
        "plotly.graph_objects",
    ):
        importlib.import_module(module)
    try:
        found = workspace.snapshot(settings.store, read_only=settings.read_only)
        if len(found.models) == 1:
            outcomes = workspace.load(found)
            space = workspace.select(found, workspace.start_view(found, outcomes))
            space.curves.marked("", space.baselines["default"])
    except CalibError:
        return  # the page says it, to whom it concerns


def _announce(host: str, port: int, settings: Settings, loading: threading.Thread) -> None:
    """Say where the page is once it answers and need not read the store first."""
    shown = f"[{host}]" if ":" in host else host
    address = (LOOPBACK if host in ("0.0.0.0", "") else "::1" if host == "::" else host, port)  # noqa: S104
    loading.join(_START_SECONDS)
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            click.echo(
                f"calib: http://{shown}:{port} shows {_without_login(settings.store)}; Ctrl-C stops it", err=True
            )
            return


def _without_login(store: str) -> str:
    scheme, found, rest = store.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if found else store
