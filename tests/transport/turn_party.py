"""One side of a shared device as a process of its own, for whoever wants to kill it: takes orders by the line."""

import sys
from pathlib import Path

from headrace.transport.turns import Turn

turn = Turn(Path(sys.argv[1]), trainer=sys.argv[2] == "trainer")
for order in sys.stdin:
    match order.split():
        case ["take"]:
            print(turn.try_take(), flush=True)
        case ["keep"]:
            turn.keep_cache()
            print("kept", flush=True)
        case ["compute", times]:
            for _ in range(int(times)):
                while not turn.try_take():
                    pass
                for event in ("begins", "ends"):
                    with open(Path(sys.argv[1]) / "events", "a") as events:
                        events.write(f"{sys.argv[2]} {event}\n")
                turn.leave()
            print("computed", flush=True)
