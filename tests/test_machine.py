"""The garbage collector of a process that has loaded everything."""

import subprocess
import sys

import pytest

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
