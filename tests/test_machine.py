"""The garbage collector of a process that has loaded everything, the kernel's view of memory, and cache directories."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.machine import HostMemory, keep_compiled_kernels

PROGRAM = """
import gc
from headrace.machine import frozen_gc

class Loop:  # only the cyclic garbage collector deletes it
    def __init__(self, name):
        self.own, self.name = self, name
        made.append(self)

    def __del__(self):
        deleted.append(self.name)

made, deleted = [], []
{first}
Loop("older")
with frozen_gc():
    Loop("newer")
    made.clear()
    gc.collect()
    print(*deleted)
gc.collect()
print(*deleted)
"""


@pytest.mark.parametrize(
    ("first", "deleted_after"),
    [("", ["newer", "older"]), ("gc.freeze()", ["newer"])],
    ids=["alone", "where objects were frozen before"],
)
def test_objects_from_before_are_not_collected_while_frozen(first: str, deleted_after: list[str]):
    program = PROGRAM.format(first=first)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    inside, after = ended.stdout.splitlines()
    assert inside.split() == ["newer"], ended.stderr
    assert after.split() == deleted_after


def test_what_is_imported_while_frozen_is_not_collected():
    program = """
import gc
from headrace.machine import frozen_imports
before = gc.get_freeze_count()
with frozen_imports():
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count() > before)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["False", "True", "True"], ended.stderr


def test_transformers_reads_the_source_files_of_its_models_once():
    program = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
from headrace.machine import frozen_imports
with frozen_imports():
    import transformers.models
print(sum(name.endswith("modeling_albert.py") for name in opened))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["1"], ended.stderr


# -- memory, from the kernel's files --------------------------------------------------------------------------------

MEMINFO = "MemTotal:        1000 kB\nMemFree:  100 kB\nMemAvailable:    800 kB\nHugePages_Total:       0\n"
NO_LIMIT = "9223372036854771712"  # version 1 without a limit


def machine(root: Path, **files: str) -> HostMemory:
    """Write the kernel's files, `__` for `/` in their names, and return the memory that they describe."""
    for name, content in {"proc__meminfo": MEMINFO, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return HostMemory(root)


HEAP = """
import ctypes
from headrace.machine import return_large_blocks

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s n mapped u f used free keep".split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo
return_large_blocks()
for size in (30, 20, 10):
    block = bytearray(size << 20)
    print(mallinfo().mapped >> 20)
    del block
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc has these functions")
def test_large_blocks_stay_out_of_the_heap_after_one_was_freed():
    printed = subprocess.check_output([sys.executable, "-c", HEAP], text=True)
    assert min(map(int, printed.split())) >= 10  # of the smallest block, which would be in the heap


def test_memory_without_control_groups_is_that_of_the_machine(tmp_path: Path) -> None:
    memory = machine(tmp_path, proc__vmstat="nr_free_pages 7\noom_kill 3\n")
    assert (memory.total(), memory.free(), memory.oom_kills()) == (1000 << 10, 800 << 10, 3)


def test_half_the_memory_counts_as_free_where_the_kernel_does_not_report_it(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path)
    assert memory.total() > 0
    assert memory.free() == memory.total() // 2
    assert memory.oom_kills() is None


def test_a_container_of_version_2_limits_memory_and_its_cached_files_count_as_free(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__pod__"
    memory = machine(
        tmp_path,
        proc__self__cgroup="0::/pod/run\n",
        **{
            f"{group}memory.max": "600000\n",
            f"{group}memory.current": "500000\n",
            f"{group}memory.stat": "anon 100000\nactive_file 150000\ninactive_file 250000\n",
            f"{group}run__memory.max": "max\n",
            f"{group}run__memory.events": "oom 1\noom_kill 2\noom_group_kill 0\n",
        },
    )
    assert (memory.total(), memory.free(), memory.oom_kills()) == (600000, 500000, 2)


def test_a_container_of_version_1_limits_memory_and_its_cached_files_count_as_free(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__memory__run__"
    memory = machine(
        tmp_path,
        proc__self__cgroup="4:memory:/run\n1:cpu:/\n0::/\n",
        proc__vmstat="oom_kill 9\n",
        **{
            f"{group}memory.limit_in_bytes": "400000",
            f"{group}memory.usage_in_bytes": "300000",
            f"{group}memory.stat": "active_file 1\ntotal_active_file 50000\ntotal_inactive_file 50000\n",
            f"{group}memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "sys__fs__cgroup__memory__memory.limit_in_bytes": NO_LIMIT,
            "sys__fs__cgroup__memory__memory.usage_in_bytes": "700000",
        },
    )
    assert (memory.total(), memory.free(), memory.oom_kills()) == (400000, 200000, 1)


def test_a_container_that_shows_the_path_of_its_host_is_found_at_the_mount(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        proc__self__cgroup="0::/host/docker/abc\n",
        **{
            "sys__fs__cgroup__memory.max": "300000\n",
            "sys__fs__cgroup__memory.current": "100000\n",
            "sys__fs__cgroup__memory.events": "oom_kill 5\n",
        },
    )
    assert (memory.total(), memory.free(), memory.oom_kills()) == (300000, 200000, 5)


def test_this_machine_has_memory() -> None:
    assert 0 < HostMemory().free() <= HostMemory().total()


def test_compiled_kernels_are_kept_in_the_cache_directory_unless_the_user_names_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    chosen = {"HEADRACE_CACHE": str(tmp_path / "cache"), "TRITON_CACHE_DIR": "/chosen"}
    monkeypatch.setattr(os, "environ", dict(chosen))
    keep_compiled_kernels()
    folder = tmp_path / "cache" / "compiled" / "inductor"
    assert os.environ == {**chosen, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    assert folder.is_dir()


def test_a_cache_directory_that_cannot_be_made_is_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "environ", {"HEADRACE_CACHE": str(tmp_path / "file")})
    keep_compiled_kernels()
    assert os.environ == {"HEADRACE_CACHE": str(tmp_path / "file")}
