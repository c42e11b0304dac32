"""The answer is code that passes tests, and nothing else that looks like it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import pytest_asyncio

from headrace.environments import code_runner
from headrace.environments.base import EpisodeError
from headrace.environments.isolation import SETTINGS_VAR
from headrace.environments.rewards import CodeExecution, Rewards, code
from tests.environments.heartbeat import ticks_during
from tests.environments.hostile import hostile
from tests.environments.test_workers import until, wait_for_lock

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = "def add(a, b):\n    return a + b\n"
ASSERTIONS = ["assert add(1, 2) == 3", "assert add(2, 2) == 5", "for n in range(3):\n    assert add(n, n) == 2 * n"]
SUM = "print(sum(map(int, input().split())))"
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the system does not hold this limit")


class Codes:
    """Rewards that share one sandbox, since starting it takes longest."""

    def __init__(self) -> None:
        self._first = CodeExecution(processes=1)
        self._first._folder = self._folder = mkdtemp()

    def __call__(self, **options: Any) -> CodeExecution:
        reward = CodeExecution(**{"timeout": 20.0, **options})
        reward._sandbox, reward._folder, reward._working_images = self._first._sandbox, self._folder, {None}
        return reward


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make() -> AsyncIterator[Codes]:
    """Rewards whose solutions can write files outside, by which these tests observe them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTINGS_VAR, '{"kind": "rlimit"}')
        codes = Codes()
        yield codes
        await codes._first.close()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can write to: a superuser's solutions become another user."""
    with TemporaryDirectory() as directory:
        path = Path(directory)
        path.chmod(0o777)
        yield path


def answer(code: str) -> str:
    return f"I would write this:\n```python\n{code}\n```\nIt should work."


async def test_the_score_is_the_share_of_tests_that_pass(make: Codes):
    assert await make()(answer(ADD), {"tests": ASSERTIONS}) == 2 / 3
    assert await make(all_or_nothing=True)(answer(ADD), {"tests": ASSERTIONS}) == 0.0
    assert await make(all_or_nothing=True)(answer(ADD), {"tests": ASSERTIONS[:1]}) == 1.0
    assert await make(tests_field="checks")(answer(ADD), {"checks": ASSERTIONS[0]}) == 1.0


async def test_a_program_is_judged_by_what_it_prints(make: Codes):
    assert await make()(answer(SUM), {"tests": PAIRS}) == 1.0
    assert await make()(answer("print(3)"), {"tests": PAIRS}) == 0.5
    guarded = f"import sys\nif __name__ == '__main__':\n    {SUM}\n    sys.exit(0)"
    assert await make()(answer(guarded), {"tests": PAIRS}) == 1.0
    threaded = f"import threading\nthreading.Thread(target=lambda: {SUM}).start()"
    assert await make()(answer(threaded), {"tests": PAIRS}) == 1.0
    assert await make()(answer(f"{SUM}\nexit(1)"), {"tests": PAIRS[:1]}) == 0.0
    assert await make()(answer(f"{SUM}\nraise ValueError"), {"tests": PAIRS[:1]}) == 0.0


async def test_space_at_the_ends_of_lines_does_not_matter(make: Codes):
    lines = answer(r"print('1 \n2\t\n\n')")
    assert await make()(lines, {"tests": [{"input": "", "output": "1\n2"}]}) == 1.0
    assert await make()(lines, {"tests": [{"input": "", "output": "1 2"}]}) == 0.0


async def test_a_function_is_judged_by_what_it_returns(make: Codes):
    tests = [{"input": [1, 2], "output": [2, 1]}, {"input": [[], {"a": None}], "output": [{"a": None}, []]}]
    swap = "def swap(a, b):\n    return b, a"
    assert await make(entry="swap")(answer(swap), {"tests": tests}) == 1.0
    assert await make(entry="function")(answer(swap), {"tests": tests, "function": "swap"}) == 1.0
    method = "class Solution:\n    def swap(self, a, b):\n        return [b, a]"
    assert await make(entry="Solution().swap")(answer(method), {"tests": tests}) == 1.0
    assert await make(entry="swop")(answer(swap), {"tests": tests}) == 0.0
    assert await make(entry="swap")(answer("def swap(a, b):\n    return {1}"), {"tests": tests}) == 0.0


async def test_the_last_block_counts(make: Codes):
    two = f"```python\n{ADD}```\nNo:\n```\ndef add(a, b):\n    return 0\n```"
    assert await make()(two, {"tests": ASSERTIONS[:1]}) == 0.0
    assert await make()(ADD, {"tests": ASSERTIONS[:1]}) == 0.0  # there is none
    assert await make()(f"```python\n{ADD}```\n```text\n3\n```", {"tests": ASSERTIONS[:1]}) == 1.0


FORGERIES = {
    "exits": "exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits later": f"{ADD}\nimport os\nadd = lambda a, b: os._exit(0)",
    "prints results": "print('passed\\n' * 3)\nprint([True, True, True])",
    "writes everywhere": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'1' * 32)\n    except OSError: pass",
    "is no code": "this is no code",
    "has a null": "a = '\\0'\x00",
    "dies": "import ctypes\nctypes.string_at(0)",
    "hides assertions": "AssertionError = ValueError\nadd = lambda a, b: -1",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "replaces compile": "import builtins\nbuiltins.compile = lambda *given, **more: 'pass'",
    "replaces exec": "import builtins\nbuiltins.exec = lambda *given: None",
    "walks frames": "import os, sys\nframe = sys._getframe()\nwhile frame:\n"
    "    for value in frame.f_locals.values():\n"
    "        if isinstance(value, bytes): os.write(3, value)\n    frame = frame.f_back\nos._exit(0)",
    "never reads": "import time\nclass add:\n    def __new__(cls, a, b): raise SystemExit(0)",
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
async def test_what_does_not_pass_tests_does_not_score(make: Codes, code: str):
    assert await make()(answer(code), {"tests": ["assert add(1, 2) == 3", PAIRS[1]]}) == 0.0


ATTACKS = {
    "writes no JSON": "import json\njson.JSONEncoder.encode = lambda *given: 'no JSON'",
    "writes too deep JSON": "import json\njson.JSONEncoder.encode = lambda *given: '[' * 100_000",
    "writes too long a number": "import sys\nsys.set_int_max_str_digits(0)\nadd = lambda a, b: 10**6000",
    "writes where its parent does": "import os\nopen(f'/proc/{os.getppid()}/fd/1', 'w').write('[')",
    "takes files from its parent": "import os, resource as r\nr.prlimit(os.getppid(), r.RLIMIT_NOFILE, (3, 3))",
}


@LINUX
@pytest.mark.parametrize("code", ATTACKS.values(), ids=ATTACKS)
async def test_an_attack_scores_nothing_and_costs_no_rollout(make: Codes, code: str):
    tests = [{"input": [1, 2], "output": 4}, {"input": [2, 2], "output": 5}]
    assert await Rewards([make(entry="add")]).score(answer(f"{ADD}\n{code}"), {"tests": tests}) == {"code": 0.0}
    assert await make(entry="add")(answer(ADD), {"tests": [{"input": [1, 2], "output": 3}]}) == 1.0


async def test_a_solution_that_removes_the_directories_above_harms_itself_alone(make: Codes):
    remove = f"import shutil\nshutil.rmtree({make._folder!r}, ignore_errors=True)\nexit(1)"
    assert await make()(answer(remove), {"tests": PAIRS[:1]}) == 0.0
    assert await make()(answer(SUM), {"tests": PAIRS[:1]}) == 1.0


async def test_true_is_not_one(make: Codes):
    tests = [{"input": [], "output": wanted} for wanted in (1, True, [{"a": 1.0}], [{"a": True}])]
    assert await make(entry="f")(answer("f = lambda: True"), {"tests": tests}) == 1 / 4
    assert await make(entry="f")(answer("f = lambda: 1.0"), {"tests": tests}) == 1 / 4
    assert await make(entry="f")(answer("f = lambda: [{'a': True}]"), {"tests": tests}) == 1 / 4
    assert await make(entry="f")(answer("f = lambda: ({'a': 1},)"), {"tests": tests}) == 1 / 4


async def test_a_solution_that_holds_up_or_brings_down_the_process_scores_nothing(
    make: Codes, public: Path, monkeypatch: pytest.MonkeyPatch
):
    started = public / "started"
    reward, hang = make(), answer(f"import time\nopen({str(started)!r}, 'w')\ntime.sleep(3600)")
    scoring = asyncio.create_task(reward(hang, {"tests": ["pass"]}))
    await until(started.exists)
    [process] = [process for process in reward._sandbox._processes if process.is_alive()]
    os.kill(process._process.pid, signal.SIGKILL)
    assert (await scoring, reward.counts["failures"], reward.counts["timeouts"]) == (0.0, 1, 0)
    await reward(answer(""), {"tests": ["pass"]})
    monkeypatch.setattr(code, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(code, "GRACE_S", 0.5)
    hang = answer("import time\ntime.sleep(3600)")  # another user's process may not write to the file
    assert (await reward(hang, {"tests": ["pass"]}), reward.counts["failures"], reward.counts["timeouts"]) == (
        0.0,
        1,
        1,
    )


async def test_a_runner_that_does_not_work_fails_the_episode():
    # No output is let through, not even that a test has passed. (A small memory_mb is no such thing: whether the test's
    # process needs to grow at all depends on what the interpreter's allocator still has free.)
    reward = CodeExecution(max_output=0, processes=1)
    with pytest.raises(EpisodeError) as failure:
        await Rewards([reward]).score(answer(ADD), {"tests": ASSERTIONS})
    assert (failure.value.reason, type(failure.value.__cause__)) == ("reward_failed", RuntimeError)
    await reward.close()


async def test_closing_removes_what_killed_solutions_left(tmp_path: Path):
    reward = CodeExecution(processes=1)
    assert await reward(answer(ADD), {"tests": ASSERTIONS[:1]}) == 1.0
    assert reward._folder is not None
    folder = Path(reward._folder)
    (folder / "left" / "behind").mkdir(parents=True)
    await reward.close()
    assert not folder.exists()  # noqa: ASYNC240


@pytest.mark.full
async def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path):
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_DIRECTORY)
    for _ in range(1200):
        os.mkdir("abcd", dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        there = os.open("abcd", os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = there
    os.close(here)
    assert code_runner._exceeds_disk_limit(str(top), 1 << 40)
    code_runner.remove_tree(str(top))
    assert not top.exists()


async def test_directories_that_are_closed_to_their_owner_are_removed(tmp_path: Path):
    inner = tmp_path / "top" / "closed" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    for directory in (inner, inner.parent):
        directory.chmod(0)
    code_runner.remove_tree(str(tmp_path / "top"))
    assert not (tmp_path / "top").exists()


async def test_what_fills_a_directory_is_every_entry_in_it(tmp_path: Path):
    for name in ("a/b", "c", "d"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "d" / "empty").touch()
    (tmp_path / "link").symlink_to("/")
    entries = 6
    assert not code_runner._exceeds_disk_limit(str(tmp_path), entries * 8192)
    assert code_runner._exceeds_disk_limit(str(tmp_path), entries * code_runner.MIN_ENTRY_BYTES - 1)


@LINUX
async def test_a_solution_can_signal_nothing_outside_of_its_namespace(make: Codes):
    apart = answer("import os\nprint(os.getppid() == 1)")
    if await make()(apart, {"tests": [{"input": "", "output": "True"}]}) == 0.0:
        pytest.skip("the system refuses a namespace of processes")
    outside = f"import os\ntry:\n    os.kill({os.getpid()}, 0)\nexcept ProcessLookupError:\n    print('gone')"
    first = (
        "import os, signal\nfor number in (signal.SIGSTOP, 9):\n    try:\n        os.kill(os.getppid(), number)\n"
        "    except PermissionError:\n        pass  # another user's\nprint(os.getppid())"
    )
    assert await make()(answer(outside), {"tests": [{"input": "", "output": "gone"}]}) == 1.0
    assert await make()(answer(first), {"tests": [{"input": "", "output": "1"}]}) == 1.0


@LINUX
async def test_time_is_the_processors(make: Codes):
    tests = {"tests": [{"input": "", "output": "rested"}]}
    assert await make(timeout=0.2)(answer("import time\ntime.sleep(0.5)\nprint('rested')"), tests) == 1.0
    assert await make(timeout=0.05)(answer("import time\ntime.sleep(60)\nprint('rested')"), tests) == 0.0


async def test_what_never_ends_scores_nothing_more_and_leaves_the_event_loop_free(make: Codes):
    code = "def add(a, b):\n    while a == 2: pass\n    return a + b"
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(1, 1) == 2"]
    score, ticks = await ticks_during(make(timeout=1.0)(answer(code), {"tests": tests}))
    assert score == 1 / 3
    assert ticks > 100


@pytest.mark.full
async def test_what_prints_without_end_or_keeps_its_output_open_scores_nothing(make: Codes):
    assert await make(max_output=1000)(answer("while True: print('3')"), {"tests": PAIRS[:1]}) == 0.0
    closed = "import os, time\nprint(3, flush=True)\nos.close(1)\ntime.sleep(3600)"
    assert await make(timeout=0.3)(answer(closed), {"tests": PAIRS[:1]}) == 0.0


@pytest.mark.parametrize("leave", ["pass", pytest.param("os.setsid()", marks=LINUX)], ids=["its group", "its session"])
async def test_processes_that_a_solution_starts_end_with_its_test(make: Codes, public: Path, leave: str):
    lock = public / "lock"
    code = (
        f"{ADD}\n{hold(lock)}\nimport time\n"
        f"if os.fork() == 0:\n    {leave}\n    if os.fork() == 0:\n        {leave}\n    time.sleep(3600)"
    )
    assert await make()(answer(code), {"tests": ASSERTIONS[:1]}) == 1.0
    wait_for_lock(lock)


def hold(lock: Path) -> str:
    """Code that holds it until its process, and all that this one has forked, ends."""
    held = f"os.open({str(lock)!r}, os.O_RDWR | os.O_CREAT, 0o666)"
    return f"import fcntl, os\nheld = {held}\nfcntl.flock(held, fcntl.LOCK_EX)"


async def test_a_cancelled_score_ends_the_solution(make: Codes, public: Path):
    lock, started = public / "lock", public / "started"
    code = f"{hold(lock)}\nopen({str(started)!r}, 'w')\nwhile True: pass"
    scoring = asyncio.create_task(make()(answer(code), {"tests": ["pass"]}))
    await until(started.exists)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    wait_for_lock(lock)


@LINUX
@pytest.mark.full
async def test_memory_is_limited(make: Codes):
    code = f"ballast = bytearray(300 << 20)\n{ADD}"
    assert await make(memory_mb=200)(answer(code), {"tests": ASSERTIONS[:1]}) == 0.0
    assert await make(memory_mb=400)(answer(code), {"tests": ASSERTIONS[:1]}) == 1.0


async def test_files_are_limited_and_removed(make: Codes, public: Path):
    recorded = public / "working_directory"
    many = f"import os\nopen({str(recorded)!r}, 'w').write(os.getcwd())\nn = 0\nwhile True:\n    n += 1\n    "
    many += "open(str(n), 'wb').write(bytes(1 << 20))"
    assert await make(disk_mb=4)(answer(many), {"tests": ["pass"]}) == 0.0
    assert not Path(recorded.read_text()).exists()  # noqa: ASYNC240
    assert await make(disk_mb=1)(answer(f"{many[: many.rindex('open')]}os.mkdir(str(n))"), {"tests": ["pass"]}) == 0.0
    one = "open('file', 'wb').write(bytes(8 << 20))"
    assert await make(disk_mb=4)(answer(one), {"tests": ["pass"]}) == 0.0
    assert await make(disk_mb=16)(answer(one), {"tests": ["pass"]}) == 1.0


async def test_a_solution_sees_an_empty_directory_and_no_variables(make: Codes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    tests = [
        "import os; assert os.listdir('.') == []",
        "import os; assert not {'SECRET_KEY', 'USER', 'VIRTUAL_ENV'} & set(os.environ)",
        "import os; assert os.environ['HOME'] == os.environ['TMPDIR'] == os.getcwd()",
        "import sys; assert sys.stdin.read() == ''",
        "import sys; assert sys.flags.isolated",
    ]
    await make._first.close()
    assert await make()(answer(""), {"tests": tests}) == 1.0


@hostile
async def test_no_text_is_too_much(make: Codes, text: str):
    assert await make()(text, {"tests": ASSERTIONS}) == 0.0


@pytest.mark.parametrize(
    ("tests", "kind"),
    [([], ValueError), ([3], ValueError), ([{"input": [1], "output": "1"}], ValueError), (None, TypeError)],
)
async def test_unusable_tests_fail_the_episode(make: Codes, tests: Any, kind: type[Exception]):
    with pytest.raises(EpisodeError) as failure:
        await Rewards([make()]).score(answer(ADD), {"tests": tests})
    assert isinstance(failure.value.__cause__, kind)
