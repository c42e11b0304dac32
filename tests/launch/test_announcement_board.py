import threading

import pytest

from headrace.launch.driver import AnnouncementBoard
from headrace.launch.node_messages import Announcement


def test_readers_get_the_entries_after_the_number_that_they_know():
    board = AnnouncementBoard()
    for path in ("a", "b"):
        board.post(Announcement(path))
    board.post(Announcement("a", withdrawn=True))
    assert board.read(0, 0.0).entries == [(1, "a", False), (2, "b", False), (3, "a", True)]
    assert board.read(2, 0.0).entries == [(3, "a", True)]
    assert board.read(3, 0.0).seq == 3 and board.read(3, 0.0).entries == []


def test_old_entries_are_forgotten_and_numbers_go_on():
    board = AnnouncementBoard(max_entries=2)
    for path in "abc":
        board.post(Announcement(path))
    assert board.read(0, 0.0).entries == [(2, "b", False), (3, "c", False)]


def test_the_number_of_an_earlier_driver_starts_from_the_beginning():
    board = AnnouncementBoard()
    board.post(Announcement("a"))
    assert board.read(1000, 0.0).entries == [(1, "a", False)]


def test_a_waiting_reader_is_woken_by_an_entry():
    board, news = AnnouncementBoard(), []
    reader = threading.Thread(target=lambda: news.append(board.read(0, 60.0)))
    reader.start()
    board.post(Announcement("weights/v-1-2"))
    reader.join(60.0)
    assert news[0].entries == [(1, "weights/v-1-2", False)]


@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "a/../../b", "", ".", "x" * 600])
def test_a_path_outside_of_the_run_directory_is_refused(path: str):
    with pytest.raises(ValueError):
        AnnouncementBoard().post(Announcement(path))
