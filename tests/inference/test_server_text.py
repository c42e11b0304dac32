"""Text that grows: all of it is sent once, in whole characters, and nothing of a stop string."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.inference.backend import GenerationResult, TokenChunk
from headrace.inference.server.streaming import DECODE_FRACTION, GrowingText, Progress, cut, cut_end, sendable_part
from headrace.inference.server.token_text import Offsets, TokenText, finite
from headrace.text.tokenizer import Tokenizer

T = TypeVar("T")


def prefixes(content: bytes) -> Iterator[str]:
    """The text after each byte, as a byte-level tokenizer gives it."""
    return (content[:end].decode(errors="replace") for end in range(1, len(content) + 1))


@settings(derandomize=True, max_examples=100, deadline=None)
@given(content=st.text() | st.binary().map(lambda raw: raw.decode(errors="replace")), stop=st.sampled_from("aé€\n "))
def test_parts_make_the_whole_and_no_part_is_taken_back(content: str, stop: str) -> None:
    stops = [stop + stop, "END"]
    growing = GrowingText(stops, ["<think>"])
    sent = "".join(growing.more(text) for text in prefixes(content.encode(errors="replace")))
    whole = cut(content, stops)
    assert whole.startswith(sent)
    assert sent + growing.rest(whole) == whole


def test_a_character_waits_for_its_last_byte() -> None:
    growing = GrowingText([], [])
    assert [growing.more(text) for text in prefixes("a€b".encode())] == ["a", "", "", "€", "b"]


def test_what_may_become_a_stop_string_waits_and_the_string_never_comes() -> None:
    growing = GrowingText(["STOP"], [])
    assert [growing.more(text) for text in ("x", "xS", "xST", "xSTa", "xSTaS")] == ["x", "", "", "STa", ""]
    assert growing.more("xSTaSTOP!") == ""
    assert growing.rest(cut("xSTaSTOP!", ["STOP"])) == ""


@pytest.mark.parametrize(
    ("text", "sure"),
    [("a<", "a"), ("a<thin", "a"), ("a<this", "a<this"), ("a \n", "a"), ("a\ufffd", "a"), ("", ""), ("a<b<", "a<b")],
)
def test_the_sure_part_leaves_out_what_may_change(text: str, sure: str) -> None:
    assert sendable_part(text, ["<think>"]) == sure


def test_the_first_of_several_stop_strings_cuts() -> None:
    assert cut("one two three", ["three", "two"]) == "one "
    assert cut("one", ["two"]) == "one"


@pytest.mark.parametrize(
    ("text", "stop", "left"), [("a User:", "User:\n", "a "), ("User:", "\nUser:", ""), ("a", "\n", "a")]
)
def test_a_stop_string_is_found_though_a_parser_took_its_white_space(text: str, stop: str, left: str) -> None:
    assert cut_end(text, [stop]) == left


def test_what_was_sent_in_error_stands_and_the_rest_follows() -> None:
    growing = GrowingText([], [])
    assert growing.more("<odd") == "<odd"
    assert growing.more("even") == ""
    assert growing.rest("<even") == "even"


def test_long_replies_are_looked_at_ever_more_rarely() -> None:
    progress = Progress()
    looks = sum(progress.add(TokenChunk([5], [0.0])) for _ in range(8192))
    # Each of the first 64 tokens, then 64 times the logarithm of the growth: 64 + 64 * ln(8192 / 64) = 374.
    assert DECODE_FRACTION == 64 and 330 < looks < 420


def test_tokens_are_sent_once() -> None:
    progress = Progress()
    progress.add(TokenChunk([1, 2], [-0.1, -0.2], [[(1, -0.1)], [(2, -0.2)]]))
    assert progress.unsent() == TokenChunk([1, 2], [-0.1, -0.2], [[(1, -0.1)], [(2, -0.2)]])
    progress.complete(GenerationResult([1, 2, 3], [-0.1, -0.2, -0.3], [], "length", None))
    assert progress.unsent() == TokenChunk([3], [-0.3])


def test_tokens_have_their_bytes_though_they_are_part_of_a_character(model_directory: Path) -> None:
    tokenizer = Tokenizer(model_directory)
    names = TokenText(tokenizer)
    euro = tokenizer.encode("€")
    assert b"".join(map(names.raw, euro)) == "€".encode()
    assert [names.label(token) for token in euro] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert (names.text(tokenizer.encode("a")[0]), names.text(258), names.text(263)) == ("a", "<|im_end|>", "")
    every = [token for byte in range(256) for token in [next(t for t in range(256) if names.raw(t) == bytes([byte]))]]
    assert sorted(every) == list(range(256))


@pytest.mark.parametrize(
    ("content", "begins"),
    [
        ("a€b".encode(), [0, 1, 1, 1, 2]),
        ("é😀".encode(), [0, 0, 1, 1, 1, 1]),
        (b"\xe2\x82a\xf0\xc3\xa9b", [0, 0, 1, 2, 3, 3, 4]),
    ],
)
def test_tokens_begin_where_the_character_does_that_they_are_part_of(content: bytes, begins: list[int]) -> None:
    offsets = Offsets()
    assert [offsets.next(bytes([byte])) for byte in content] == begins


def test_a_token_without_text_begins_where_the_next_one_does() -> None:
    offsets = Offsets()
    assert [offsets.next(content) for content in (b"ab", b"", "€".encode(), b"c")] == [0, 2, 2, 3]


def test_minus_infinity_is_a_number() -> None:
    assert (finite(float("-inf")), finite(-1.5)) == (-9999.0, -1.5)


@pytest.mark.parametrize("called", [False, True])
def test_other_threads_go_on_while_a_long_text_is_made_into_tokens(model_directory: Path, called: bool) -> None:
    tokenizer = Tokenizer(model_directory)
    text = "hello world " * 40_000
    found = beside_others(lambda: tokenizer(text)["input_ids"] if called else tokenizer.encode(text))
    assert found == tokenizer.encode("hello world ") * 40_000


def test_other_threads_go_on_while_many_tokens_are_made_into_text(model_directory: Path) -> None:
    tokenizer = Tokenizer(model_directory)
    ids = tokenizer.encode("hello world ") * 40_000
    assert beside_others(lambda: tokenizer.decode(ids)) == "hello world " * 40_000


def beside_others(function: Callable[[], T]) -> T:
    """What the function returns, from a thread that must not hold up this one."""
    begun, found = threading.Event(), []

    def call() -> None:
        begun.set()
        found.append(function())

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10  # one or two, were all held up
    return found[0]
