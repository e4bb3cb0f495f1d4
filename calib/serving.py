"""What `calib serve` does: from its settings to a gateway that runs, with a clear refusal before anything listens.

Leaves to others: the application (`calib.serve`), the servers behind it (`calib.upstreams`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import FastAPI

from calib import serve
from calib.dashboard import is_loopback
from calib.declog import DecisionLog
from calib.engine.base import Engine, EngineInfo
from calib.errors import CalibError
from calib.limits import MAX_CONCURRENCY, MAX_QUEUE, Admission, read_key
from calib.reload import PolicyFile, check_model
from calib.running import run

__all__ = ["Model", "Settings", "run_gateway"]


@dataclass(frozen=True)
class Settings:
    """What the command line says.

    Attributes
    ----------
    host, port : str, int
        Where to listen; port 0 takes a free one.
    policy_file : str or None
        A ``policy.json``.
    allow_other_model : bool
        Whether a policy may have been tuned on another model.
    key_env : str or None
        Environment variable with the key that clients must send.
    no_key : bool
        Whether to go without one where other machines can reach the address.
    max_concurrency, max_queue : int
        Requests that are answered at a time, and that may wait.
    max_body : int
        Bytes of a request.
    log_file : str or None
        Where a line for each decision goes.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    policy_file: str | None = None
    allow_other_model: bool = False
    key_env: str | None = None
    no_key: bool = False
    max_concurrency: int = MAX_CONCURRENCY
    max_queue: int = MAX_QUEUE
    max_body: int = serve.MAX_BODY
    log_file: str | None = None


@dataclass(frozen=True)
class Model:
    """Who answers.

    Attributes
    ----------
    engine, info : Engine, EngineInfo
    context_tokens : int
        The longest thought.
    name : str
        For the line that says that the gateway is up.
    arm : str or None
        Way of serving, where it is known.
    """

    engine: Engine
    info: EngineInfo
    context_tokens: int
    name: str
    arm: str | None = None


def run_gateway(
    open_model: Callable[[str | None], Awaitable[Model]], settings: Settings, say: Callable[[str], None]
) -> None:
    """Serve until SIGTERM.

    Parameters
    ----------
    open_model : callable
        Gets the policy's arm, None without a policy, inside the loop that serves.
    settings : Settings
    say : callable
        Gets what the user should know; the first line has the address.

    Raises
    ------
    CalibError
        A setting that cannot be, a policy that does not fit the model, an address that cannot be had.
    """
    if settings.key_env is None and not settings.no_key and not is_loopback(settings.host):
        raise CalibError(
            f"--host {settings.host} can be reached from other machines, so clients must give a key: put one in an "
            "environment variable and name it (--key-env CALIB_KEY), or say --no-key to answer whoever can reach it"
        )
    key = read_key(settings.key_env) if settings.key_env else None
    file = PolicyFile.read(settings.policy_file) if settings.policy_file else None
    lines: list[str] = []

    async def opened() -> FastAPI:
        model = await open_model(file.policy.arm if file else None)

        def fits(changed: PolicyFile) -> str | None:
            if model.arm is not None and changed.policy.arm != model.arm:
                raise CalibError(
                    f"--arm {model.arm}, but {changed.path} was tuned for arm {changed.policy.arm}; "
                    "leave --arm out, or tune again"
                )
            return check_model(changed, model.info, allow_other=settings.allow_other_model)

        try:
            doubt = fits(file) if file else None
            app = serve.create_app(
                model.engine,
                info=model.info,
                policy=file,
                context_tokens=model.context_tokens,
                max_body=settings.max_body,
                admission=Admission(settings.max_concurrency, settings.max_queue),
                key=key,
                decision_log=DecisionLog(settings.log_file) if settings.log_file else None,
                accept=fits,
                say=say,
            )
        except CalibError:
            await model.engine.close()
            raise
        lines.extend([model.name, *app.state.service.effective(), *([f"warning: {doubt}"] if doubt else [])])
        return app

    def announce(url: str) -> None:
        say(f"{url} {lines[0]}" + "".join(f"\n  {line}" for line in lines[1:]))

    run(opened, host=settings.host, port=settings.port, announce=announce)
