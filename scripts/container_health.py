"""The health check of the container: a run in `outputs` makes progress or has finished, or a server answers.

Standard library only. Exit status 0 is healthy, 1 is not.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path

MAX_SILENCE_S = 60.0
"""A run writes its heartbeat every 5 s."""
SERVER = "http://127.0.0.1:8000/health"


def main() -> int:
    heartbeats = [json.loads(path.read_text()) for path in Path().glob("outputs/*/heartbeat.json")]
    if heartbeats:
        newest = max(heartbeats, key=lambda heartbeat: heartbeat["time"])
        alive = newest["state"] == "running" and time.time() - newest["time"] < MAX_SILENCE_S
        return 0 if alive or newest["state"] == "finished" else 1
    try:
        with urllib.request.urlopen(SERVER, timeout=5) as response:
            return 0 if response.status == 200 else 1
    except OSError as error:
        print(f"no run in {Path().absolute() / 'outputs'}, and {SERVER}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
