"""One side of the device lock as a process that tests may kill; reads one command per line."""

import sys
from pathlib import Path

from headrace.transport.lock import DeviceLock

lock = DeviceLock(Path(sys.argv[1]), trainer=sys.argv[2] == "trainer")
for order in sys.stdin:
    match order.split():
        case ["take"]:
            print(lock.try_acquire(), flush=True)
        case ["keep"]:
            lock.mark_cache_resident()
            print("kept", flush=True)
        case ["compute", times]:
            for _ in range(int(times)):
                while not lock.try_acquire():
                    pass
                for event in ("begins", "ends"):
                    with open(Path(sys.argv[1]) / "events", "a") as events:
                        events.write(f"{sys.argv[2]} {event}\n")
                lock.release()
            print("computed", flush=True)
