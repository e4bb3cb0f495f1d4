"""Servers of arms, as real processes: started, watched, stopped with all that they started; every failure is made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from calib import launch
from calib.arms import Arm, arm_of
from calib.errors import CalibError
from calib.gpu import Gpu, read_gpus
from calib.launch import launched, needs_launch
from calib.processes import Family

SERVER = '''
"""A server of a few lines: server.py PORT [WORD...]"""
import http.server, json, os, signal, socket, subprocess, sys, time

port, words = int(sys.argv[1]), sys.argv[2:]
note = lambda name, text: open(name, "a").write(f"{text}\\\\n")
note("pids", os.getpid())
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "children" in words:
    sleeper = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    command = [sys.executable, "-S", "-E", "-c", sleeper]
    for group in (None, 0):  # one in this process group, one that leaves it
        child = subprocess.Popen(command, process_group=group, stdout=subprocess.PIPE)
        child.stdout.readline()
        note("pids", child.pid)
if "crash" in words:
    for n in range(30):
        print("\\\\x1b[31mline", n, "\\\\x1b[0m", flush=True)
    sys.exit("no: " + os.environ.get("VLLM_API_KEY", "") + " is not the way")
if "hang" in words:
    time.sleep(600)
started, loading = time.time(), 0.5 if "slow" in words else 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        note("asked", self.path)
        if self.path == "/die":
            print("dying as told", flush=True)
            os._exit(3)
        status, body = 404, {}
        if time.time() - started < loading:
            status = 503
        elif self.path == "/health":
            status, body = 200, None
        elif self.path == "/v1/models":
            status, body = (401, {}) if "locked" in words else (200, {"data": [{"id": "tiny"}]})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"" if body is None else json.dumps(body).encode())

    def log_message(self, *_):
        pass


class Quick(http.server.ThreadingHTTPServer):
    def server_bind(self):  # the usual one looks its name up
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()


print("serving", flush=True)
Quick(("127.0.0.1", port), Handler).serve_forever()
'''.replace("\\\\", "\\")

BARE = (sys.executable, "-S", "-E")  # starts fast


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path


def arm(home: Path, port: int, *words: str, **fields: Any) -> Arm:
    values: dict[str, Any] = {
        "start": (*BARE, "server.py", str(port), *words),
        "folder": home,
        "ready_seconds": 20.0,
        "stop_seconds": 5.0,
        "origin": "arms.toml: [arms.base]",
    }
    return Arm("base", (f"http://127.0.0.1:{port}",), **{**values, **fields})


def pids(home: Path) -> list[int]:
    return [int(line) for line in (home / "pids").read_text().split()]


def alive(pid: int) -> bool:
    """Whether it runs; one that waits for its parent to notice its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.02)


@contextlib.contextmanager
def running(home: Path, port: int, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that somebody else started."""
    command = [*BARE, "server.py", str(port), *words]
    with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(lambda: answers(port))
        yield process
        process.kill()


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


async def failure(arm: Arm, home: Path, **options: Any) -> CalibError:
    with pytest.raises(CalibError) as caught:
        async with launched(arm, log_dir=home / "logs", say=lambda _: None, **options):
            pytest.fail("it was taken for ready")
    return caught.value


# --- started and stopped ----------------------------------------------------------------------------------------------


async def test_a_server_is_started_awaited_and_stopped(home: Path, port: int) -> None:
    told: list[str] = []
    async with launched(arm(home, port, "slow"), log_dir=home / "logs", say=told.append) as serving:
        assert serving.urls == (f"http://127.0.0.1:{port}",)
        assert serving.started
        assert pids(home) == [serving.pid]
        assert serving.seconds >= 0.5  # it answered 503 so long
        assert serving.log == home / "logs/base.log"
        assert answers(port)
    assert not alive(pids(home)[0])
    assert not answers(port)
    assert [line.split(": ")[1].split()[0] for line in told] == ["started", "ready", "stopping"]
    header, line = (home / "logs/base.log").read_text().splitlines()
    assert "calib starts arm base: " in header
    assert line == "serving"
    assert (home / "logs/base.log").stat().st_mode & 0o777 == 0o600


async def test_progress_tells_the_seconds_and_the_last_line_of_the_log(
    home: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_TELL_EVERY", 0.05)
    monkeypatch.setattr(launch, "_POLL_LONGEST", 0.1)
    told: list[str] = []
    async with launched(arm(home, port, "slow"), log_dir=home, say=told.append):
        pass
    assert any(line.startswith("base: not ready after ") and line.endswith("its log: serving") for line in told)


async def test_the_embedded_server_as_an_arm(home: Path, port: int) -> None:
    command = (sys.executable, "-m", "calib", "serve", "--engine", "simulated", "--port", str(port))
    start = (*command, "--profile", "gev-validation")
    async with launched(arm(home, port, start=start, ready_seconds=60.0), log_dir=home, say=lambda _: None) as serving:
        pid = serving.pid
        assert pid is not None
        assert alive(pid)
    assert not alive(pid)


async def test_arms_of_one_address_run_one_after_another(home: Path, port: int) -> None:
    for expected in (1, 2, 3):
        async with launched(arm(home, port), log_dir=home, say=lambda _: None):
            assert len(pids(home)) == expected
    assert (home / "base.log").read_text().count("calib starts arm base") == 3


def test_the_same_under_uvloop(home: Path, port: int) -> None:
    async def main() -> None:
        async with launched(arm(home, port, "children", stop_seconds=0.2), log_dir=home, say=lambda _: None):
            assert answers(port)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert not any(map(alive, pids(home)))


async def test_children_that_ignore_sigterm_or_leave_the_group_are_stopped_too(home: Path, port: int) -> None:
    slow_to_go = arm(home, port, "stubborn", "children", stop_seconds=0.3)
    async with launched(slow_to_go, log_dir=home, say=lambda _: None):
        assert len(pids(home)) == 3
        assert all(map(alive, pids(home)))
        left = time.monotonic()
    assert 0.3 <= time.monotonic() - left < 5
    assert not any(map(alive, pids(home)))


async def test_only_what_was_started_is_stopped(home: Path, port: int) -> None:
    bystander = subprocess.Popen([*BARE, "-c", "import time; time.sleep(600)"])
    try:
        async with launched(arm(home, port), log_dir=home, say=lambda _: None):
            pass
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_whatever_ends_the_block_stops_the_server(home: Path, port: int, error: BaseException) -> None:
    with pytest.raises(type(error)):
        async with launched(arm(home, port, "children", stop_seconds=0.2), log_dir=home, say=lambda _: None):
            raise error
    assert len(pids(home)) == 3
    assert not any(map(alive, pids(home)))


async def test_a_cancelled_wait_stops_what_is_loading(home: Path, port: int) -> None:
    async def main() -> None:
        async with launched(arm(home, port, "hang"), log_dir=home, say=lambda _: None):
            pytest.fail("it never gets ready")

    task = asyncio.create_task(main())
    while not (home / "pids").exists():
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(map(alive, pids(home)))


async def test_an_interrupt_just_before_the_stop_does_away_with_the_grace(home: Path, port: int) -> None:
    def say(line: str) -> None:
        if "stopping" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        async with launched(arm(home, port, "stubborn", stop_seconds=600.0), log_dir=home, say=say):
            pass
    assert not alive(pids(home)[0])


async def test_a_second_cancellation_does_away_with_the_grace(home: Path, port: int) -> None:
    ready = asyncio.Event()

    async def main() -> None:
        stubborn = arm(home, port, "stubborn", stop_seconds=600.0)
        async with launched(stubborn, log_dir=home, say=lambda _: None):
            ready.set()
            await asyncio.sleep(600)

    task = asyncio.create_task(main())
    await ready.wait()
    task.cancel()
    await asyncio.sleep(0.2)
    assert alive(pids(home)[0])  # it was asked to go, and has time
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pids(home)[0])


COLLECTOR = """
import asyncio, sys
from pathlib import Path
from calib.arms import Arm
from calib.launch import launched

async def main(home, port, words, stop_seconds):
    start = (sys.executable, "-S", "-E", "server.py", port, *words)
    arm = Arm("base", (f"http://127.0.0.1:{port}",), start=start, folder=Path(home), stop_seconds=stop_seconds)
    async with launched(arm, log_dir=home, say=lambda line: print(line, flush=True)):
        await asyncio.sleep(600)

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[4:], float(sys.argv[3])))
"""


@contextlib.contextmanager
def collector(home: Path, port: int, stop_seconds: float, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that serves an arm, in a session of its own as in a terminal of its own."""
    command = [sys.executable, "-c", COLLECTOR, str(home), str(port), str(stop_seconds), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert any(word in line for line in process.stdout), process.communicate()[1]


@pytest.mark.parametrize(("words", "word"), [(["children"], "ready after"), (["hang", "children"], "started")])
def test_ctrl_c_stops_the_server(home: Path, port: int, words: list[str], word: str) -> None:
    with collector(home, port, 0.2, *words) as process:
        read_until(process, word)
        wait_until(lambda: (home / "pids").exists() and len(pids(home)) == 3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode != 0
        assert "KeyboardInterrupt" in errors
        assert not any(map(alive, pids(home)))


def test_further_ctrl_cs_do_not_leave_the_server_behind(home: Path, port: int) -> None:
    with collector(home, port, 600, "stubborn", "children") as process:
        read_until(process, "ready after")
        process.send_signal(signal.SIGINT)
        read_until(process, "stopping")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert not any(map(alive, pids(home)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_a_collector_that_is_killed_does_not_leave_the_server_behind(home: Path, port: int, number: int) -> None:
    with collector(home, port, 1, "stubborn", "children") as process:
        read_until(process, "ready after")
        assert len(pids(home)) == 3
        process.send_signal(number)
        process.wait(timeout=20)
        wait_until(lambda: not any(map(alive, pids(home))))


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_an_early_end_shows_the_code_and_the_last_lines(home: Path, port: int) -> None:
    secret = "hunter2hunter2"
    environ = {"PATH": os.environ["PATH"], "SERVER_KEY": secret, "OTHER_TOKEN": "x" * 20}
    crashing = arm(home, port, "crash", env={"VLLM_API_KEY": "$SERVER_KEY"})
    error = await failure(crashing, home, environ=environ)
    assert error.exit_code == 1
    lines = str(error).splitlines()
    assert lines[0].startswith("the server of arm 'base' ended with exit code 1 after ")
    assert lines[1].startswith("command: ")
    assert "OTHER_TOKEN, SERVER_KEY (env_from" in lines[2]
    assert lines[3] == f"the end of {home}/logs/base.log:"
    assert lines[4:] == [f"  line {n}" for n in range(11, 30)] + ["  no: *** is not the way"]
    header = (home / "logs/base.log").read_text().splitlines()[0]
    assert secret not in header


async def test_the_log_of_an_earlier_start_is_not_shown(home: Path, port: int) -> None:
    await failure(arm(home, port, "crash"), home)
    error = await failure(arm(home, port, start=("false",)), home)
    assert "exit code 1" in str(error)
    assert str(error).endswith("logs/base.log holds nothing of it")


async def test_a_command_that_leaves_a_service_behind_is_told_to_stay(home: Path, port: int) -> None:
    error = await failure(arm(home, port, start=("true",)), home)
    assert "ended with exit code 0" in str(error)
    assert "has to stay" in str(error)


async def test_a_script_may_end_while_its_server_stays(home: Path, port: int) -> None:
    script = f"{sys.executable} -S -E server.py {port} & "
    async with launched(arm(home, port, start=("bash", "-c", script)), log_dir=home, say=lambda _: None):
        assert alive(pids(home)[0])
    assert not alive(pids(home)[0])


async def test_a_script_that_fails_takes_its_children_along(home: Path, port: int) -> None:
    script = "sleep 600 & echo $! > pids; exit 4"
    error = await failure(arm(home, port, start=("bash", "-c", script)), home)
    assert "exit code 4" in str(error)
    assert not any(map(alive, pids(home)))


async def test_a_killed_server_names_the_signal(home: Path, port: int) -> None:
    error = await failure(arm(home, port, start=("bash", "-c", "kill -9 $$")), home)
    assert "was ended by SIGKILL" in str(error)
    assert "out of memory" in str(error)


async def test_a_server_that_is_never_ready_is_given_up_and_stopped(home: Path, port: int) -> None:
    error = await failure(arm(home, port, "hang", ready_seconds=0.5), home)
    assert error.exit_code == 1
    assert "was not ready within 0.5 s" in str(error)
    assert f"listen at http://127.0.0.1:{port}?" in str(error)
    assert "raise ready_seconds in arms.toml: [arms.base]" in str(error)
    assert not any(map(alive, pids(home)))


async def test_a_server_that_takes_connections_and_says_nothing_is_given_up(home: Path, port: int) -> None:
    script = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    started = time.monotonic()
    error = await failure(arm(home, port, start=(*BARE, "-c", script), ready_seconds=1.0), home)
    assert "was not ready within 1 s: no answer" in str(error)
    assert time.monotonic() - started < 6


async def test_a_server_behind_a_key_names_the_field(home: Path, port: int) -> None:
    error = await failure(arm(home, port, "locked"), home)
    assert 'api_key_env = "NAME"' in str(error)
    assert not any(map(alive, pids(home)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"start": ("no-such-program-here",)}, "start: 'no-such-program-here' cannot be started: No such file"),
        ({"start": ("./server.py",)}, "'./server.py' cannot be started: Permission denied"),
        ({"folder": Path("/no/such/folder")}, "folder: there is no folder /no/such/folder"),
        ({"log": Path("/proc/x/base.log")}, "the log /proc/x/base.log cannot be written"),
        ({"env_from": ("NO_SUCH_VARIABLE",)}, "NO_SUCH_VARIABLE is not set"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE holds no API key"),
    ],
)
async def test_what_cannot_be_started_is_said(home: Path, port: int, fields: dict[str, Any], said: str) -> None:
    assert said in str(await failure(arm(home, port, **fields), home))


async def test_an_occupied_address_is_refused_and_left_alone(home: Path, port: int) -> None:
    with running(home, port) as other:
        error = await failure(arm(home, port), home)
        assert f"something already serves http://127.0.0.1:{port} (it serves tiny)" in str(error)
        assert "out of arms.toml: [arms.base]" in str(error)
        assert other.poll() is None
    assert len(pids(home)) == 1


async def test_an_address_that_something_else_listens_at_is_refused(home: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as other:
        other.settimeout(0.2)
        asking = asyncio.create_task(failure(arm(home, port), home))
        while not asking.done():
            with contextlib.suppress(TimeoutError):
                connection, _ = await asyncio.to_thread(other.accept)
                connection.close()
        assert "what it is does not show" in str(await asking)


async def test_a_death_within_the_block_explains_its_error(home: Path, port: int) -> None:
    with pytest.raises(CalibError) as caught:  # noqa: PT012 - what the block does is what is tested
        async with launched(arm(home, port), log_dir=home, say=lambda _: None) as serving:
            await get(serving.urls[0] + "/die")
            raise CalibError("nobody answers", exit_code=1)
    assert str(caught.value).startswith("nobody answers\nthe server of arm 'base' ended with exit code 3 after ")
    assert str(caught.value).endswith("  dying as told")


async def test_a_death_that_nobody_noticed_is_told(home: Path, port: int) -> None:
    told: list[str] = []
    async with launched(arm(home, port), log_dir=home, say=told.append) as serving:
        await get(serving.urls[0] + "/die")
    assert any("base: the server of arm 'base' ended with exit code 3" in line for line in told)


async def test_an_error_of_the_block_alone_stays_as_it_is(home: Path, port: int) -> None:
    with pytest.raises(CalibError, match=r"^mine$"):
        async with launched(arm(home, port), log_dir=home, say=lambda _: None):
            raise CalibError("mine")


async def get(url: str) -> None:
    """Ask, and wait until the answer or the end of the connection."""
    host, _, rest = url.removeprefix("http://").partition(":")
    port, _, path = rest.partition("/")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /{path} HTTP/1.0\r\n\r\n".encode())
    await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    await asyncio.sleep(0.1)


# --- servers that run already -----------------------------------------------------------------------------------------


async def test_a_running_server_is_used_and_left_running(home: Path, port: int) -> None:
    mine = arm_of("base", f"http://127.0.0.1:{port}")
    assert not needs_launch(mine)
    with running(home, port) as other:
        async with launched(mine, log_dir=home / "logs", say=pytest.fail) as serving:
            assert serving.urls == mine.urls
            assert not serving.started
        assert other.poll() is None
    assert not (home / "logs").exists()


async def test_one_of_several_that_is_dead_is_left_out(home: Path, port: int) -> None:
    told: list[str] = []
    with running(home, port):
        mine = arm_of("base", f"http://127.0.0.1:1,http://127.0.0.1:{port}")
        async with launched(mine, log_dir=home, say=told.append) as serving:
            assert serving.urls == (f"http://127.0.0.1:{port}",)
    (line,) = told
    assert line.startswith("base: not ready and left out: http://127.0.0.1:1")


async def test_no_running_server_tells_how_one_is_started(home: Path, port: int) -> None:
    error = await failure(arm_of("base", f"http://127.0.0.1:{port}"), home)
    assert error.exit_code == 1
    assert f"no server of arm 'base' is ready: http://127.0.0.1:{port}" in str(error)
    assert 'start = ["bash", "serve.sh"]' in str(error)


async def test_a_running_server_that_still_loads_is_not_ready(home: Path, port: int) -> None:
    with running(home, port, "slow"):
        error = await failure(arm_of("base", f"http://127.0.0.1:{port}"), home)
        assert "HTTP 503" in str(error)


# --- memory of the GPU ------------------------------------------------------------------------------------------------


def fake_nvidia_smi(home: Path, gpus: str, apps: str = "", code: int = 0) -> dict[str, str]:
    """An environment whose nvidia-smi prints these rows."""
    folder = home / "bin"
    folder.mkdir(exist_ok=True)
    script = f"""#!/bin/sh
case "$1" in
--query-gpu=*) cat <<'END'
{gpus}
END
;;
--query-compute-apps=*) cat <<'END'
{apps}
END
;;
esac
exit {code}
"""
    (folder / "nvidia-smi").write_text(script)
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


H200 = "0, GPU-73135759-902e-e3a9-a419-6bd80685f6dc, 143771, 143156"
TAKEN = "1, GPU-1b, 81920, 8192"
USER = "GPU-1b, 77, /usr/bin/python, a, 73728"


async def test_gpus_are_read_in_the_order_that_a_program_sees(home: Path) -> None:
    environ = fake_nvidia_smi(home, f"{H200}\n{TAKEN}", "GPU-1b, 77, python3, 73728\nGPU-1b, 78, x, [N/A]")
    users = ("python3 (process 77, 72.0 GiB)", "x (process 78)")
    first = Gpu(0, "GPU-73135759-902e-e3a9-a419-6bd80685f6dc", 143771 / 1024, 143156 / 1024)
    second = Gpu(1, "GPU-1b", 80.0, 8.0, users)
    assert await read_gpus(environ) == (first, second)
    for visible, expected in (
        ("1", (second,)),
        ("1,0", (second, first)),
        ("GPU-7313", (first,)),
        ("0,7,1", (first,)),
        ("", ()),
        ("-1", ()),
        ("MIG-x", ()),
    ):
        assert await read_gpus({**environ, "CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.parametrize(("gpus", "code"), [("", 0), (H200, 9), ("0, GPU-1, [N/A], [N/A]", 0), ("Failed to start", 0)])
async def test_a_machine_that_does_not_tell_has_no_gpus(home: Path, gpus: str, code: int) -> None:
    assert await read_gpus(fake_nvidia_smi(home, gpus, code=code)) == ()
    assert await read_gpus({"PATH": str(home)}) == ()


async def test_an_nvidia_smi_that_hangs_is_not_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = fake_nvidia_smi(home, H200)
    (home / "bin/nvidia-smi").write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr("calib.gpu._PATIENCE", 0.2)
    assert await read_gpus(environ) == ()


async def test_a_taken_gpu_is_refused_with_who_takes_it(home: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MEMORY_WAIT", 0.1)
    monkeypatch.setattr(launch, "_POLL_LONGEST", 0.05)
    environ = fake_nvidia_smi(home, TAKEN, "GPU-1b, 77, python3, 73728")
    error = await failure(arm(home, port), home, environ=environ)
    assert "GPU 1 has 8.0 of 80.0 GiB free, 72.0 are needed (python3 (process 77, 72.0 GiB))" in str(error)
    assert "gpu_free_gib = 40" in str(error)
    assert not (home / "pids").exists()
    for enough in (0.0, 8.0):
        async with launched(arm(home, port, gpu_free_gib=enough), log_dir=home, say=lambda _: None, environ=environ):
            assert answers(port)


async def test_memory_that_comes_back_is_waited_for(home: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_POLL_LONGEST", 0.05)
    environ = fake_nvidia_smi(home, TAKEN)
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        fake_nvidia_smi(home, "1, GPU-1b, 81920, 81000")

    async with launched(arm(home, port), log_dir=home, say=say, environ=environ):
        assert told[0].startswith("base: waiting up to 30 s for GPU memory: GPU 1 has 8.0")
        assert told[1].startswith("base: started")


@pytest.mark.parametrize(
    ("start", "needed"),
    [
        (("bash", "serve.sh"), 90.0),
        (("vllm", "serve", "m", "--gpu-memory-utilization", "0.5"), 50.0),
        (("vllm", "serve", "m", "--gpu-memory-utilization=x"), 90.0),
    ],
)
def test_what_a_server_will_take(start: tuple[str, ...], needed: float) -> None:
    arm = Arm("base", ("http://a:1",), start=start)
    assert launch._lacking(arm, [Gpu(0, "GPU-0", 100.0, needed)]) == ""
    assert f"{needed:.1f} are needed" in launch._lacking(arm, [Gpu(0, "GPU-0", 100.0, needed - 1)])


@pytest.mark.parametrize(
    ("flags", "looked_at"), [((), 1), (("-tp", "2"), 2), (("-tp", "2", "--data-parallel-size=2"), 4)]
)
def test_every_gpu_that_a_server_will_take_is_looked_at(flags: tuple[str, ...], looked_at: int) -> None:
    arm = Arm("base", ("http://a:1",), start=("vllm", "serve", "m", *flags))
    for taken in range(4):
        gpus = [Gpu(n, f"GPU-{n}", 100.0, 0.0 if n == taken else 100.0) for n in range(4)]
        assert bool(launch._lacking(arm, gpus)) == (taken < looked_at)


# --- the family -------------------------------------------------------------------------------------------------------


async def test_a_family_that_is_over_is_never_signalled_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (home / "out").open("wb") as output:
        family = Family(["true"], env={"PATH": os.environ["PATH"]}, folder=home, output=output, grace=1.0)
    while family.members():
        await asyncio.sleep(0.02)
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("the number may be another's by now"))
    await family.end()
    assert family.exit_code == 0
    assert family.members() == []


async def test_a_process_that_cannot_be_killed_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (home / "out").open("wb") as output:
        family = Family(["sleep", "600"], env={"PATH": os.environ["PATH"]}, folder=home, output=output, grace=0.1)
    with monkeypatch.context() as patched:
        patched.setattr("calib.processes._KILL_SECONDS", 0.1)
        patched.setattr(Family, "_signal", lambda *_: None)
        with pytest.raises(CalibError, match=rf"processes {family.pid} outlived SIGKILL"):
            await family.end()
    os.killpg(family.pid, signal.SIGKILL)
    await family.end()
    assert family.exit_code == -signal.SIGKILL


async def test_without_proc_the_group_itself_is_asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calib.processes._PROC", home / "proc")
    with (home / "out").open("wb") as output:
        family = Family(["sleep", "600"], env={"PATH": os.environ["PATH"]}, folder=home, output=output, grace=5.0)
    assert family.members() == [family.pid]
    await family.end()
    assert family.members() == []
    assert not alive(family.pid)
