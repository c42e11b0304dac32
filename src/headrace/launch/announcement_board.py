"""Announcements of paths that now exist in the run directory, or no longer do, for processes on all hosts.

They are hints, which arrive before a network file system shows a change: files stay the truth. Old ones are forgotten.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import dropwhile
from pathlib import PurePosixPath

from headrace.launch.node_messages import Announcement, News

MAX_ENTRIES = 4096
MAX_PATH_CHARACTERS = 512


class AnnouncementBoard:
    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._entries: deque[tuple[int, str, bool]] = deque(maxlen=max_entries)
        self._seq = 0
        self._changed = threading.Condition()
        self._is_closed = False

    def post(self, announcement: Announcement) -> int:
        """Add an entry and return its number. Raises `ValueError` for a path that is not inside the run directory."""
        path = PurePosixPath(announcement.path)
        if len(announcement.path) > MAX_PATH_CHARACTERS or path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"path = {announcement.path[:100]!r}: not a path inside the run directory")
        with self._changed:
            self._seq += 1
            self._entries.append((self._seq, str(path), announcement.withdrawn))
            self._changed.notify_all()
            return self._seq

    def read(self, after: int, wait_s: float) -> News:
        """Return the entries after number `after`; if there are none, wait for one.

        A number of an earlier driver, above the newest, counts as 0.
        """
        with self._changed:
            after = 0 if after > self._seq else after
            self._changed.wait_for(lambda: self._seq > after or self._is_closed, wait_s)
            return News(self._seq, list(dropwhile(lambda entry: entry[0] <= after, self._entries)))

    def close(self) -> None:
        """Release all readers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
