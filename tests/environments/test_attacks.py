"""Hostile solutions: bubblewrap stops every attack, and the fallback stops it or names it in the notice."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.environments import isolation
from headrace.environments.isolation import SETTINGS_VAR, SandboxSettings
from headrace.environments.rewards import CodeExecution
from headrace.environments.sandbox import CallFailed, CallTimeout, Sandbox
from tests.environments.attacks import ATTACKS, DISK_MB, MEMORY_MB, PROCESSES
from tests.environments.sandbox_functions import NAME

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="the attacks are Linux's"),
]
BREACH = [{"input": "", "output": "breach"}]
AMPLE = 60.0
WAIT_S = 10.0
"""Long enough for limits that are polled twenty times a second, on any machine; what they end does not wait so long."""


def bubblewrap_or_skip() -> None:
    if (problem := isolation.bubblewrap_problem()) is not None:
        pytest.skip(f"{problem}; make test-sandbox installs it")


KINDS = [pytest.param("strict", marks=pytest.mark.full, id="bubblewrap"), pytest.param("rlimit", id="fallback")]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Prepare a secret, services and a process to attack; yield their places by the names that attacks use."""
    root = tmp_path_factory.mktemp("outside")
    secret = root / "secret"
    secret.write_text("hunter2")
    path = str(root / "service.socket")
    services = []
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, path),
        (socket.AF_UNIX, "\0" + path[-40:]),
    ):
        service = socket.socket(family)
        service.bind(address)
        service.listen()
        services.append(service)
        threading.Thread(target=_greet, args=[service], daemon=True).start()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    threading.Thread(target=_echo, args=[datagrams], daemon=True).start()
    sleep = "3600.125"
    victim = subprocess.Popen(["sleep", sleep], env={**os.environ, "API_KEY": "hunter2"}, start_new_session=True)
    yield {
        "SECRET": str(secret),
        "OUTSIDE": str(root),
        "SITE_PACKAGES": sysconfig.get_path("purelib"),
        "TCP_PORT": services[0].getsockname()[1],
        "UDP_PORT": datagrams.getsockname()[1],
        "UNIX_SOCKET": path,
        "VICTIM": victim.pid,
        "SLEEP": sleep,
    }
    assert victim.poll() is None, "an attack has ended a process outside"
    victim.kill()
    victim.wait()
    for service in (*services, datagrams):
        service.shutdown(socket.SHUT_RDWR) if service is not datagrams else None
        service.close()


def _greet(service: socket.socket) -> None:
    while True:
        try:
            service.accept()[0].sendall(b"breach")
        except OSError:  # closed
            return


def _echo(datagrams: socket.socket) -> None:
    while True:
        try:
            datagrams.sendto(b"breach", datagrams.recvfrom(64)[1])
        except OSError:  # closed
            return


class Attacked:
    """A reward for each kind of sandbox, which attacks share."""

    def __init__(self) -> None:
        self._rewards: dict[str, CodeExecution] = {}
        self._breaches: dict[str, dict[str, bool]] = {}

    def __call__(self, kind: str, **options: Any) -> CodeExecution:
        if kind == "strict":
            bubblewrap_or_skip()
        isolation.apply_settings(SandboxSettings(kind=kind, processes=PROCESSES))  # type: ignore[arg-type]
        limits = {"timeout": 20.0, "memory_mb": MEMORY_MB, "disk_mb": DISK_MB, "processes": 1, **options}
        reward = CodeExecution(**limits)
        first = self._rewards.setdefault(kind, reward)
        reward._sandbox = first._sandbox
        return reward

    async def breaches(self, kind: str, places: dict[str, Any]) -> dict[str, bool]:
        """Return which attacks succeed. All are tests of one solution, which is quicker than a solution each."""
        if kind not in self._breaches:
            reward = self(kind)
            codes = {name: attack.code for name, attack in ATTACKS.items()}
            solution = f"{assignments(places, wait_s=WAIT_S)}\nexec({codes!r}[input()])"
            tests = [{"kind": "program", "input": name, "expected": "breach"} for name in ATTACKS]
            passed = await reward._run(answer(solution), tests, {**reward._limits, "entry": None, "image": None})
            self._breaches[kind] = dict(zip(ATTACKS, passed, strict=True))
        return self._breaches[kind]

    async def close(self) -> None:
        for reward in self._rewards.values():
            await reward.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked() -> AsyncIterator[Attacked]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTINGS_VAR, "{}")  # restored at the end
        patch.setenv("SECRET_KEY", "hunter2")
        rewards = Attacked()
        yield rewards
        await rewards.close()


def assignments(places: dict[str, Any], wait_s: float) -> str:
    return "\n".join(f"{name} = {value!r}" for name, value in {**places, "WAIT": wait_s}.items())


def answer(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_stopped_or_named(attacked: Attacked, places: dict[str, Any], name: str, kind: str):
    succeeded = (await attacked.breaches(kind, places))[name]
    named = kind == "rlimit" and ATTACKS[name].named in isolation.fallback_allows()
    assert not succeeded or named


async def test_every_attack_has_a_name_in_the_notice_and_every_name_an_attack():
    everything = isolation.FALLBACK_ALLOWS | isolation.WITHOUT_FILTER | isolation.WITHOUT_NAMESPACE
    assert {attack.named for attack in ATTACKS.values()} - {None} == everything.keys()
    assert len(ATTACKS) >= 30


@pytest.mark.full
@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_succeeds_without_a_sandbox(places: dict[str, Any], name: str, tmp_path: Path):
    if os.geteuid() != 0 and ATTACKS[name].needs_root:
        pytest.skip("it needs a superuser")
    if name == "traces its parent":
        pytest.skip("it would stop the tests")
    with open(os.devnull) as inherited:  # noqa: ASYNC230
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"{assignments(places, wait_s=0.5)}\n{ATTACKS[name].code}"),
            cwd=tmp_path,
            env={**os.environ, "SECRET_KEY": "hunter2"},
            pass_fds=[inherited.fileno()],
            stdout=asyncio.subprocess.PIPE,
        )
    output, _ = await asyncio.wait_for(process.communicate(), AMPLE)
    assert output.strip() == b"breach"


HOPELESS = {
    "never ends": ("while True: pass", {"timeout": 0.5}),
    "sleeps": ("import time\ntime.sleep(3600)", {"timeout": 0.1}),
    "burns CPU time in children": ("import os\nos.fork()\nos.fork()\nwhile True: pass", {"timeout": 1.0}),
    "prints a gigabyte": ("while True: print('x' * 1_000_000)", {}),
    "recurses": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", {"timeout": 0.5}),
    "crashes": ("import ctypes\nctypes.string_at(0)", {}),
    "kills its parent": ("import os\nos.kill(os.getppid(), 9)", {}),
    "stops its parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)", {}),
    "takes its parent's files": ("import os, resource as r\nr.prlimit(os.getppid(), r.RLIMIT_NOFILE, (3, 3))", {}),
    "removes what it finds": ("import shutil\nshutil.rmtree('/tmp', True)\nshutil.rmtree('/dev/shm', True)", {}),
    "doubles for ever": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"timeout": 1.0}),
    "kills everything": ("import os\nos.kill(-1, 9)", {}),
}
"""Programs that score nothing, and the options of the reward."""
WITHIN_BUBBLEWRAP = ("removes what it finds", "kills everything")
"""Those that only run where nothing else can be harmed."""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["strict", "rlimit"])
@pytest.mark.parametrize("name", HOPELESS)
async def test_a_hopeless_solution_scores_nothing_and_the_next_one_is_scored(attacked: Attacked, name: str, kind: str):
    if kind == "rlimit" and name in WITHIN_BUBBLEWRAP:
        pytest.skip("it could harm the machine")
    code, options = HOPELESS[name]
    started = time.monotonic()
    assert await attacked(kind, **options)(answer(code), {"tests": BREACH}) == 0.0
    assert time.monotonic() - started < AMPLE  # what held a reward for 54 s did so at timeout = 2
    assert await attacked(kind)(answer("print('breach')"), {"tests": BREACH}) == 1.0


@pytest.mark.parametrize("kind", KINDS)
async def test_no_process_outlives_its_test(attacked: Attacked, kind: str):
    marker = f"3600.{os.getpid()}{kind}".replace("strict", "1").replace("rlimit", "2")
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execvp('sleep', ['sleep', '{marker}'])\n    os._exit(0)\ntime.sleep(0.2)\nprint('breach')"
    )
    assert await attacked(kind)(answer(code), {"tests": BREACH}) == 1.0
    processes = await asyncio.create_subprocess_exec("ps", "-eo", "args", stdout=asyncio.subprocess.PIPE)
    assert marker not in (await processes.communicate())[0].decode()


@pytest_asyncio.fixture(loop_scope="module", params=KINDS)
async def untrusted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandbox]:
    """A sandbox of untrusted functions."""
    if request.param == "strict":
        bubblewrap_or_skip()
    monkeypatch.setenv(SETTINGS_VAR, f'{{"kind": "{request.param}", "memory_mb": {MEMORY_MB}, "output_mb": 4}}')
    sandbox = Sandbox(1, untrusted=True, modules=[NAME])
    yield sandbox
    await sandbox.close()


async def test_an_untrusted_function_leaves_nothing_for_the_next_call(untrusted: Sandbox):
    async def call(function: str, *args: Any) -> Any:
        return await untrusted.call(f"{NAME}:{function}", *args, timeout=AMPLE)

    assert await call("same", {"a": [1, None, "ü"]}) == {"a": [1, None, "ü"]}
    assert await call("replace_same") == "replaced"
    assert await call("same", 3) == 3
    with pytest.raises(CallFailed, match="process"):
        await call("write_everywhere")
    with pytest.raises(CallFailed, match="process"):
        await untrusted.call("os:_exit", 0, timeout=AMPLE)
    with pytest.raises(CallFailed, match="process"):
        await call("same", "x" * (5 << 20))  # above output_mb
    with pytest.raises(CallFailed, match="MemoryError"):
        await call("want_memory", 2 * MEMORY_MB)
    with pytest.raises(CallTimeout):
        await untrusted.call("re:fullmatch", "(a+)+$", "a" * 40 + "!", timeout=0.3, wall_factor=1000.0)
    assert await call("same", 4) == 4


@pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed")
@pytest.mark.full
async def test_a_task_with_an_image_runs_in_a_container():
    listing = ("podman", "images", "--format", "{{.Repository}}:{{.Tag}}")
    podman = await asyncio.create_subprocess_exec(*listing, stdout=asyncio.subprocess.PIPE)
    images = (await podman.communicate())[0].decode().split()
    image = next((name for name in images if "python" in name), None)
    if image is None:
        pytest.skip("there is no image with Python")
    reward = CodeExecution(image_field="image", processes=1)
    inside = "import os\nif os.getuid() == 65534 and os.getpid() < 100: print('breach')"
    assert await reward(answer(inside), {"tests": BREACH, "image": image}) == 1.0
    await reward.close()
