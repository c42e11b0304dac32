"""Stop strings: found in what was sampled, however its tokens cut it, and nowhere else."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from headrace.inference.backend import GenerationResult
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import Request, StopStrings
from headrace.inference.schema import SamplingParams
from headrace.text.tokenizer import Tokenizer
from tests.inference.plain_forward import assert_like_plain, run_all


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Tokenizer:
    """A token for every byte."""
    return Tokenizer(model_directory)


class Dictated:
    """An engine whose requests sample a given sequence of tokens."""

    def __init__(self, model: Any, decode: Any, special_tokens: Collection[int] = ()) -> None:
        self.engine = Engine(model, max_model_len=128, decode=decode, special_tokens=special_tokens)

    def run(
        self, sampled: Sequence[int], stop: list[str], prompt: Sequence[int] = (), **params: Any
    ) -> GenerationResult:
        request = self.engine.submit(
            [5, *prompt], SamplingParams(stop=stop, max_tokens=len(sampled), ignore_eos=True, **params)
        )
        append = Request.append
        script = iter(sampled)
        with patch.object(Request, "append", lambda self, token, *rest: append(self, next(script), *rest)):
            run_all(self.engine)
        return request.future.result(timeout=0)


@pytest.fixture
def dictated(model: Any, tokenizer: Tokenizer) -> Dictated:
    return Dictated(model, tokenizer.decode, tokenizer.control_tokens)


def stopped(result: GenerationResult, tokenizer: Tokenizer) -> tuple[str, str, int | str | None]:
    return tokenizer.decode(result.token_ids), result.finish_reason, result.stop_reason


@pytest.mark.parametrize(
    ("text", "stop", "ending"),
    [
        ("one END two", ["END"], ("one END", "stop", "END")),
        ("END two", ["END"], ("END", "stop", "END")),
        ("!two", ["!"], ("!", "stop", "!")),
        ("one two", ["END"], ("one two", "length", None)),
        ("one END two", ["wo", "END"], ("one END", "stop", "END")),
        ("EN END", ["END"], ("EN END", "stop", "END")),
        ("EENDD", ["END"], ("EEND", "stop", "END")),
        # both end with the same token: the one that begins first is named
        ("abcd", ["cd", "bcd"], ("abcd", "stop", "bcd")),
        ("abcd", ["bc", "c"], ("abc", "stop", "bc")),
        ("two\n\nthree", ["\n\n"], ("two\n\n", "stop", "\n\n")),
        ("größer", ["ö"], ("grö", "stop", "ö")),  # two bytes, of which the first alone is nothing
        ("5 € 6", ["€"], ("5 €", "stop", "€")),
        ("ein 🙂 da", ["🙂 d"], ("ein 🙂 d", "stop", "🙂 d")),
        ("🙂🙂🙃", ["🙃"], ("🙂🙂🙃", "stop", "🙃")),  # the first three bytes are the same
    ],
)
def test_a_request_ends_with_the_token_that_completes_a_stop_string(
    dictated: Dictated, tokenizer: Tokenizer, text: str, stop: list[str], ending: tuple[str, str, str | None]
) -> None:
    sampled = tokenizer.encode(text)
    assert len(sampled) == len(text.encode())
    assert stopped(dictated.run(sampled, stop), tokenizer) == ending


@pytest.mark.parametrize(
    ("text", "stop", "ending"),
    [
        ("EN<|im_start|>D two", ["END"], "EN<|im_start|>D"),
        ("one E<|im_start|><|im_end|>ND<|im_start|> two", ["END"], "one E<|im_start|><|im_end|>ND"),
        ("E" + "<|im_start|>" * 60 + "ND two", ["END"], "E" + "<|im_start|>" * 60 + "ND"),
        ("a<|im_start|>b two", ["<|im_start|>"], "a<|im_start|>"),
        ("a<|im_start|>b two", ["t", "a<|im_start|>b"], "a<|im_start|>b"),
    ],
)
def test_a_stop_string_may_lie_around_special_tokens_or_spell_them(
    dictated: Dictated, tokenizer: Tokenizer, text: str, stop: list[str], ending: str
) -> None:
    assert stopped(dictated.run(tokenizer.encode(text), stop), tokenizer) == (ending, "stop", stop[-1])


def test_the_name_of_a_special_token_completes_no_string(dictated: Dictated, tokenizer: Tokenizer) -> None:
    sampled = tokenizer.encode("EN<|im_start|>")  # whose name is no text
    assert stopped(dictated.run(sampled, ["END", "start", "EN<"]), tokenizer) == ("EN<|im_start|>", "length", None)


def test_a_long_stop_string_after_a_long_text_is_found(dictated: Dictated, tokenizer: Tokenizer) -> None:
    stop = "a rather long line — with strange characters: ÄÖÜ🙂"
    text = "before " * 5 + stop
    assert stopped(dictated.run(tokenizer.encode(text + "x"), [stop]), tokenizer) == (text, "stop", stop)


def test_a_stop_string_within_a_token_or_across_two_ends_with_the_token(model: Any) -> None:
    words = {10: "Hello", 11: ", wor", 12: "ld! And", 13: " more"}
    dictated = Dictated(model, lambda tokens: "".join(words[token] for token in tokens))
    for stop, length in (("ell", 1), ("o, w", 2), ("world", 3), ("Hello, world! And more", 4), ("!", 3)):
        result = dictated.run([10, 11, 12, 13], [stop])
        assert (len(result.token_ids), result.finish_reason, result.stop_reason) == (length, "stop", stop)


def test_the_prompt_is_not_searched(dictated: Dictated, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("END EN")
    result = dictated.run(tokenizer.encode("D one END two"), ["END"], prompt)
    assert stopped(result, tokenizer) == ("D one END", "stop", "END")


def test_a_stop_token_in_a_stop_string_is_named_only_if_it_completes_nothing(
    dictated: Dictated, tokenizer: Tokenizer
) -> None:
    sampled = tokenizer.encode("ab.cd")
    [dot] = tokenizer.encode(".")
    both = dictated.run(sampled, ["b."], stop_token_ids=[dot])
    assert stopped(both, tokenizer) == ("ab.", "stop", "b.")
    token = dictated.run(sampled, ["x"], stop_token_ids=[dot])
    assert stopped(token, tokenizer) == ("ab.", "stop", dot)


def test_a_string_that_the_last_token_completes_counts_as_stop(dictated: Dictated, tokenizer: Tokenizer) -> None:
    assert stopped(dictated.run(tokenizer.encode("one END"), ["END"]), tokenizer) == ("one END", "stop", "END")


def test_stop_strings_of_what_a_model_really_samples(model: Any) -> None:
    def letters(tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)

    engine = Engine(model, max_model_len=128, decode=letters)
    params = {"max_tokens": 40, "ignore_eos": True, "seed": 4}
    free = engine.submit([5, 6, 7], SamplingParams(**params))
    run_all(engine)
    sampled = free.future.result().token_ids
    stop = letters(sampled)[10:13]
    requests = [engine.submit([5, 6, 7], SamplingParams(stop=[stop], **params)) for _ in range(2)]
    run_all(engine)
    length = letters(sampled).index(stop) + 3
    for request in requests:
        result = request.future.result()
        assert (result.token_ids, result.finish_reason, result.stop_reason) == (sampled[:length], "stop", stop)
        assert_like_plain(request, model)


def test_text_is_decoded_only_where_the_last_token_may_complete_something() -> None:
    decoded: list[list[int]] = []
    words = {1: "ab", 2: "c", 3: "d\ufffd", 4: "x", 5: ""}

    def decode(tokens: list[int]) -> str:
        decoded.append(tokens)
        return "".join(words[token] for token in tokens)

    strings = StopStrings(decode)
    for token in words:
        strings.find_completed(["abx"], [9, token], 1)  # by now it knows each of them alone
    decoded.clear()
    assert strings.find_completed(["bc"], [9, 1, 1], 1) is None
    assert strings.find_completed(["bc"], [9, 1, 5], 1) is None
    assert decoded == []
    assert strings.find_completed(["bc"], [9, 1, 2], 1) == "bc"
    assert strings.find_completed(["bc", "abx"], [9, 1, 4], 1) == "abx"
    assert strings.find_completed(["bc"], [9, 1, 3], 1) is None  # part of a character, which may be any
    assert strings.find_completed(["c "], [9, 2, 5], 1) is None  # a decoder may leave a space out
    assert decoded == [[1, 2], [1, 4], [1, 3], [2, 5]]
