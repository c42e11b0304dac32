"""Which sandbox is chosen, and the command lines that start one; nothing is started here."""

from __future__ import annotations

import os
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest

from headrace.environments import isolation
from headrace.environments.arguments import BadArgument
from headrace.environments.isolation import (
    SETTINGS_VAR,
    SandboxSettings,
    apply_settings,
    bubblewrap_command,
    current_settings,
    fallback_notice,
    podman_command,
    register_untrusted,
    uses_bubblewrap,
)
from headrace.environments.rewards import CodeExecution
from headrace.errors import BadInput
from headrace.launch.checks import check_run
from tests.config.run_files import MINIMAL, load_text, run

MACHINES = [*isolation.CALL_NUMBERS]


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "bubblewrap_problem", lambda: "the program bwrap is not installed")


def options_of(command: list[str]) -> list[str]:
    return command[: command.index("--")]


def pairs_after(command: list[str], option: str) -> list[tuple[str, str]]:
    places = [place for place, part in enumerate(command) if part == option]
    return [(command[place + 1], command[place + 2]) for place in places]


@pytest.mark.parametrize("user", [None, 1_900_000_000])
def test_bubblewrap_gives_a_program_no_network_no_processes_and_nothing_to_write_but_its_own(user: int | None):
    command = bubblewrap_command(["python", "-I"], {"/program.py": "/somewhere/program.py"}, user=user, disk_mb=16)
    options = options_of(command)
    assert command[command.index("--") + 1 :] == ["python", "-I"]
    unshared = {"--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"}
    assert {*unshared, "--new-session", "--die-with-parent", "--clearenv"} <= set(options)
    assert not {"--bind", "--dev-bind", "--share-net"} & set(options)
    assert [options[at + 1] for at, part in enumerate(options) if part == "--tmpfs"] == ["/dev/shm", "/tmp"]
    assert options.count(str(16 << 20)) == 2
    last_mount = max(at for at, part in enumerate(options) if part in ("--ro-bind", "--tmpfs", "--symlink", "--dir"))
    assert options.index("/", last_mount) > last_mount and options[options.index("/", last_mount) - 1] == "--remount-ro"
    assert ("/somewhere/program.py", "/program.py") in pairs_after(options, "--ro-bind")


def test_a_superuser_changes_to_a_user_of_its_own_and_others_get_a_namespace():
    as_root = bubblewrap_command(["true"], user=isolation.FIRST_USER_ID, disk_mb=1)
    assert "--unshare-user" not in as_root
    added = [as_root[at + 1] for at, part in enumerate(as_root) if part == "--cap-add"]
    assert (as_root[as_root.index("--cap-drop") + 1], added) == ("ALL", ["CAP_SETUID", "CAP_SETGID"])
    as_user = bubblewrap_command(["true"], user=None, disk_mb=1)
    assert {"--unshare-user", "--disable-userns"} <= set(as_user)
    assert as_user[as_user.index("--uid") + 1] == str(isolation.OTHER_USER_ID)
    assert "--cap-add" not in as_user


def test_only_the_system_and_the_interpreter_can_be_read():
    sources = [
        Path(source) for source, _ in pairs_after(bubblewrap_command(["true"], user=None, disk_mb=1), "--ro-bind")
    ]
    allowed = [Path("/usr"), *map(Path, isolation.SYSTEM_FOLDERS), *map(Path, isolation.SYSTEM_FILES)]
    interpreter = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]]
    assert set(sources) <= {*allowed, *interpreter}
    assert not {Path("/"), Path("/etc"), Path("/home"), Path.home(), Path.cwd()} & set(sources)


@pytest.mark.parametrize(
    ("capabilities", "users", "expected"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("00000000a80425fb", "0 0 4294967295", True),  # in a container of Docker
        ("0000000000000000", "0 0 4294967295", False),
        ("000001ffffffffff", "0 1000 1\n1 100000 65536", False),  # in a container without root
    ],
)
def test_a_process_changes_its_user_if_it_has_the_privileges_and_the_users_exist(
    tmp_path: Path, capabilities: str, users: str, expected: bool
):
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    (tmp_path / "uid_map").write_text(users)
    assert isolation.may_change_user(tmp_path) is expected


def test_podman_runs_an_image_without_network_and_rights():
    files = {"/code_runner.py": "/src/code_runner.py"}
    command = podman_command("python:3.12", ["python3", "-I"], files, memory_mb=512, processes=64, disk_mb=16)
    assert command[:2] == ["podman", "run"]
    assert {"--network=none", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"} <= set(command)
    assert {"--memory=512m", "--memory-swap=512m", "--pids-limit=64", "--shm-size=16m", "--rm"} <= set(command)
    assert {"--volume=/src/code_runner.py:/code_runner.py:ro", "--user=65534:65534", "--pull=never"} <= set(command)
    assert command[-3:] == ["--entrypoint=python3", "python:3.12", "-I"]


def test_images_need_podman(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BadArgument) as refused:
        CodeExecution(image_field="image")
    assert refused.value.problems[0].key == "image_field"


def test_strict_is_refused_where_bubblewrap_does_not_work(monkeypatch: pytest.MonkeyPatch, not_installed: None):
    monkeypatch.setenv(SETTINGS_VAR, "strict")
    with pytest.raises(BadInput) as refused:
        CodeExecution()
    assert (refused.value.key, refused.value.value) == ("environments.sandbox", "strict")


def test_the_fallback_is_announced_with_everything_that_it_allows(monkeypatch: pytest.MonkeyPatch, not_installed: None):
    monkeypatch.setenv(SETTINGS_VAR, "auto")
    monkeypatch.setattr(isolation, "_registered", set())
    assert not uses_bubblewrap()
    assert fallback_notice() is None  # no untrusted code is run
    register_untrusted("function")
    notice = fallback_notice()
    assert notice is not None and "bwrap is not installed" in notice
    assert isolation.FALLBACK_ALLOWS.items() <= isolation.fallback_allows().items()
    assert all(text in notice for text in isolation.fallback_allows().values())


def test_without_filters_and_namespaces_the_fallback_allows_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation, "has_filters", lambda: False)
    monkeypatch.setattr(isolation, "interpreter_is_public", lambda: False)
    monkeypatch.setattr(isolation, "may_enter_namespace", lambda with_users: False)
    expected = isolation.FALLBACK_ALLOWS | isolation.WITHOUT_FILTER | isolation.WITHOUT_NAMESPACE
    assert isolation.fallback_allows() == expected


def test_settings_travel_to_other_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SETTINGS_VAR, "")
    apply_settings(SandboxSettings(kind="rlimit", memory_mb=100))
    assert current_settings() == SandboxSettings(kind="rlimit", memory_mb=100)
    reward = CodeExecution(memory_mb=512, timeout=5.0, max_output=1)
    assert (reward._limits["memory_mb"], reward._limits["timeout"], reward._limits["max_output"]) == (100, 5.0, 1)
    monkeypatch.setenv(SETTINGS_VAR, "none")
    with pytest.raises(BadInput) as refused:
        current_settings()
    assert refused.value.key == SETTINGS_VAR


def test_a_run_file_that_says_strict_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, not_installed: None):
    monkeypatch.setenv(SETTINGS_VAR, "auto")  # restored at the end
    config = run(environments={"sandbox": {"kind": "strict"}})
    with pytest.raises(BadInput) as refused:
        check_run(config)
    assert "environments.sandbox" in [problem.key for problem in refused.value.problems]
    assert current_settings() == SandboxSettings(kind="strict")


def test_a_text_stands_for_the_kind_of_sandbox(tmp_path: Path):
    assert load_text(tmp_path, f'{MINIMAL}[environments]\nsandbox = "rlimit"')[0].environments.sandbox.kind == "rlimit"
    assert load_text(tmp_path, MINIMAL, "--environments.sandbox=strict")[0].environments.sandbox.kind == "strict"


ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026


def verdict(program: bytes, number: int, architecture: int, argument: int = 0) -> int:
    """Return what a BPF program returns for a system call."""
    data = struct.pack("=IIQQ", number, architecture, 0, argument)
    instructions, at, word = [*struct.iter_unpack("=HBBI", program)], 0, 0
    while True:
        code, if_true, if_false, value = instructions[at]
        if code == isolation.RETURN:
            return value
        at += 1
        if code == isolation.LOAD:
            [word] = struct.unpack_from("=I", data, value)
        else:
            test = {
                isolation.EQUAL: word == value,
                isolation.AT_LEAST: word >= value,
                isolation.ANY_BIT: bool(word & value),
            }
            at += if_true if test[code] else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_what_reaches_out_and_allows_the_rest(machine: str):
    architecture, numbers = isolation.CALL_NUMBERS[machine]
    program = isolation.build_filter(machine, sockets=True)
    refused = {name for name, number in numbers.items() if verdict(program, number, architecture) == EPERM}
    assert refused == numbers.keys() - {"clone", "clone3", "socket"}
    assert verdict(program, numbers["clone3"], architecture) == ENOSYS
    assert verdict(program, numbers["clone"], architecture, 0x003D0F00) == ALLOW  # a thread
    assert verdict(program, numbers["clone"], architecture, 0x10000011) == EPERM  # CLONE_NEWUSER
    assert verdict(program, 0, architecture) == ALLOW
    assert verdict(program, 0x40000000 + 1, architecture) == EPERM
    assert verdict(program, 0, architecture + 1) == KILL
    assert verdict(isolation.build_filter(machine, sockets=False), numbers["socket"], architecture) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_has_the_kernels_numbers(machine: str):
    """aarch64's are the generic ones, which every machine's headers have."""
    path = Path(
        "/usr/include", {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}[machine]
    )
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    kernel = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", path.read_text())}
    own = {name: number for name, number in isolation.CALL_NUMBERS[machine][1].items() if name in kernel}
    assert len(own) >= 40  # of 42; the headers may be of an older kernel
    assert own == {name: kernel[name] for name in own}


def test_a_cgroup_is_made_below_the_nearest_group_with_the_controllers(tmp_path: Path):
    for path, controllers in (
        ("", "cpu memory pids"),
        ("user", "cpu memory pids"),
        ("user/app", "cpu"),
        ("system", ""),
    ):
        (tmp_path / path).mkdir(exist_ok=True)
        (tmp_path / path / "cgroup.subtree_control").write_text(controllers)
        (tmp_path / path / "cgroup.procs").touch()
    assert isolation.find_parent(tmp_path, "4:memory:/other\n0::/user/app\n") == tmp_path / "user"
    assert isolation.find_parent(tmp_path, "0::/system\n") == tmp_path
    assert isolation.find_parent(tmp_path, "4:memory:/user\n") is None
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    assert isolation.find_parent(tmp_path, "0::/system\n") is None


def test_a_cgroup_limits_memory_and_tasks_and_starts_a_program_inside(tmp_path: Path):
    group = isolation.Cgroup(tmp_path, memory_mb=64, tasks=16)
    assert (group.folder / "memory.max").read_text() == str(64 << 20)
    assert (group.folder / "pids.max").read_text() == "16"
    command = group.command(["sh", "-c", "echo started"])
    assert os.popen(" ".join(map(repr, command))).read() == "started\n"
    assert (group.folder / "cgroup.procs").read_text().strip().isdecimal()


def test_a_cgroup_that_cannot_be_made_is_reported_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(isolation, "find_usable_parent", lambda: tmp_path / "removed")
    assert [isolation.make_cgroup(64, 16) for _ in range(2)] == [None, None]
    assert [str(tmp_path) in record.message for record in caplog.records] == [True]
    monkeypatch.setattr(isolation, "find_usable_parent", lambda: None)
    assert isolation.make_cgroup(64, 16) is None
    monkeypatch.setattr(isolation, "find_usable_parent", lambda: tmp_path)
    group = isolation.make_cgroup(64, 16)
    assert group is not None and group.folder.parent == tmp_path
