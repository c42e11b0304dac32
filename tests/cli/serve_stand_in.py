"""What a chat finds in place of `headrace serve`: `serve_stand_in.py NOTES [ARGUMENT ...]`.

It notes its process and its arguments, and answers as the stand-in for a server does; with a seed of 13 it fails.
"""

import os
import signal
import sys
from pathlib import Path

from headrace.cli.serve import greeting
from tests.cli.chat_stand_in import chat_stand_in

notes, *arguments = sys.argv[1:]
Path(notes).write_text(" ".join([str(os.getpid()), *arguments]))
if "13" in arguments:
    print("no luck today")
    sys.exit(3)
with chat_stand_in() as server:
    print(greeting(server.url, "HEADRACE_API_KEY"), flush=True)
    signal.pause()
