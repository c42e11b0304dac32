"""A chat over a real connection: replies as they come, interruptions, and what goes wrong."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.inference.client.chat_stream import ChatClient
from headrace.observe.console import SafeConsole
from headrace.tools.chat import Conversation, Session, Terminal, talk
from tests.cli.chat_stand_in import HANG_UP_WAIT, ChatStandIn, chat_stand_in

CTRL_C = KeyboardInterrupt()
CTRL_D = EOFError()


@pytest.fixture
def other() -> Iterator[ChatStandIn]:
    with chat_stand_in() as server:
        yield server


class Screen(io.StringIO):
    """What is written to the terminal; Ctrl-C is pressed when it shows `until`."""

    def __init__(self, until: str | None = None) -> None:
        super().__init__()
        self._until = until

    def write(self, text: str) -> int:
        if self._until is not None and self._until in text:
            self._until = None
            raise KeyboardInterrupt
        return super().write(text)


def typed(*lines: str | BaseException) -> Callable[[str], str]:
    """Somebody who types these lines, and presses these keys."""
    left = iter(lines)

    def read(prompt: str) -> str:
        line = next(left)
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def chat(
    other: ChatStandIn, *lines: str | BaseException, screen: Screen | None = None, colours: bool = False
) -> tuple[str, Conversation]:
    """All that a chat shows, and what was said."""
    screen = screen or Screen()
    console = SafeConsole(file=screen, force_terminal=colours, color_system="standard" if colours else None)
    server = ChatClient(f"{other.url}/v1")
    session = Session(server, server.models()[0], Conversation())
    try:
        talk(session, Terminal(console), typed(*lines))
    finally:
        server.close()
    return screen.getvalue(), session.conversation


def test_a_reply_is_shown_and_what_there_is_to_know_about_it(other: ChatStandIn):
    other.health = {"status": "ok", "version": "0-50"}
    shown, conversation = chat(other, "Hello?", "/exit")
    reply, facts = shown.splitlines()
    assert reply == "Hello."
    tokens, speed, *rest = facts.split(", ")
    assert tokens == "2 tokens"
    assert speed.endswith(" tokens/s")
    assert rest == ["stop", "weights 0-50", "context 22 of 32"]
    assert [message["content"] for message in conversation.messages] == ["Hello?", "Hello."]


def test_each_request_has_all_that_was_said_and_what_was_set(other: ChatStandIn):
    chat(other, "/system Be brief.", "/set temperature .7", "One?", "Two?", CTRL_D)
    first, second = other.asked
    assert first["temperature"] == 0.7
    assert (first["model"], first["stream"]) == ("small", True)
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "One?", "Hello.", "Two?"]


def test_a_line_with_two_slashes_is_sent_with_one(other: ChatStandIn):
    chat(other, "//etc/hosts?", "a / b", CTRL_D)
    assert [request["messages"][-1]["content"] for request in other.asked] == ["/etc/hosts?", "a / b"]


def test_thoughts_are_dimmed_and_tool_calls_are_text(other: ChatStandIn):
    other.events = [
        {"reasoning_content": "Weather, "},
        {"reasoning_content": "then."},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Bern"}'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "time", "arguments": "{}"}}]},
    ]
    other.finish = "tool_calls"
    shown, conversation = chat(other, "Weather?", CTRL_D)
    assert shown.splitlines()[:4] == ["Weather, then.", "I look.", 'weather {"city": "Bern"}', "time {}"]
    assert conversation.messages[-1]["tool_calls"][0] == {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    coloured, _ = chat(other, "Weather?", CTRL_D, colours=True)
    assert "\x1b[2mWeather, \x1b[0m" in coloured
    assert "\x1b[2mI look." not in coloured


def test_a_models_words_cannot_command_the_terminal(other: ChatStandIn):
    other.events = [{"content": "a\x1b[2Jb\r\x9bc\td\n"}]
    shown, _ = chat(other, "Hello?", CTRL_D)
    assert shown.splitlines()[0].startswith(r"a\x1b[2Jb\u009bc")
    assert "\x1b" not in shown


def test_nor_can_a_servers_words(other: ChatStandIn):
    other.refusal = (400, "no\x1b[2Jsuch")
    shown, _ = chat(other, "Hello?", CTRL_D)
    assert r"no\x1b[2Jsuch" in shown
    assert "\x1b" not in shown


def test_a_line_break_that_only_unicode_knows_is_part_of_the_reply(other: ChatStandIn):
    other.escapes = False
    other.events = [{"content": "a\u2028b\u2029c\x85d"}, {"content": "e"}]
    shown, conversation = chat(other, "Hello?", CTRL_D)
    assert "what it should not" not in shown
    assert conversation.messages[-1]["content"] == "a\u2028b\u2029c\x85de"


def test_ctrl_c_stops_the_reply_and_hangs_up_and_a_second_one_leaves(other: ChatStandIn):
    other.goes_on = True
    shown, conversation = chat(other, "Hello?", CTRL_C, screen=Screen(until=" more"))
    reply, facts = shown.splitlines()[:2]
    assert reply.startswith("Hello.")
    assert facts == "stopped"
    assert other.hung_up.wait(HANG_UP_WAIT)
    assert conversation.messages[-1]["content"].startswith("Hello. more")


def test_at_the_prompt_ctrl_c_leaves_the_second_time_in_a_row(other: ChatStandIn):
    shown, _ = chat(other, CTRL_C, "Hello?", CTRL_C, CTRL_C, "never read")
    assert shown.count("Ctrl-C again leaves") == 2
    assert len(other.asked) == 1


def test_a_full_context_says_how_full_and_what_to_do(other: ChatStandIn):
    other.refusal, other.counted = (400, "prompt too long"), 33
    shown, conversation = chat(other, "Hello?", CTRL_D)
    assert (
        "the conversation has 33 tokens, and the model takes 32, its reply included: /reset forgets what was said"
        in shown
    )
    assert conversation.messages == []


def test_a_reply_that_the_context_cut_off_says_so(other: ChatStandIn):
    other.finish, other.usage = "length", {"prompt_tokens": 20, "completion_tokens": 12}
    shown, _ = chat(other, "Hello?", CTRL_D)
    assert "length, context 32 of 32, which is full: /reset forgets what was said" in shown


@pytest.mark.parametrize("counted", [None, 20])
def test_another_refusal_is_told_in_the_servers_words_and_the_question_taken_back(
    other: ChatStandIn, counted: int | None
):
    other.refusal, other.counted = (400, "temperature must be finite"), counted
    shown, conversation = chat(other, "Hello?", CTRL_D)
    assert f"temperature must be finite (HTTP 400 from {other.url}/v1/chat/completions)" in shown
    assert conversation.messages == []


def test_a_reply_that_breaks_off_is_kept_as_far_as_it_came(other: ChatStandIn):
    other.error = "the engine died"
    shown, conversation = chat(other, "Hello?", CTRL_D)
    assert "the reply broke off: the engine died" in shown
    assert conversation.messages[-1]["content"] == "Hello."
    other.error, other.finish = None, None
    assert "in the middle of the reply" in chat(other, "Hello?", CTRL_D)[0]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["chat", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_message_prints_the_answer_alone(
    other: ChatStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADRACE_API_KEY", "sesame")
    other.events.insert(0, {"reasoning": "Greet."})
    options = ["--system", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--seed", "3", "--top-p", ".9"]
    assert run(capsys, other.url, "--message", "Hello?", *options) == (0, "Hello.\n", "")
    (asked,) = other.asked
    wanted = {"temperature": 0.0, "max_tokens": 9, "seed": 3, "top_p": 0.9}
    assert {name: asked[name] for name in wanted} == wanted
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert set(other.keys) == {"Bearer sesame"}


class TerminalOutput(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("output", "printed"), [(io.StringIO, "a\x1b[2Jb\tc\n"), (TerminalOutput, "a\\x1b[2Jb\tc\n")])
def test_a_printed_answer_is_as_the_model_said_it_but_for_what_would_command_a_terminal(
    other: ChatStandIn, monkeypatch: pytest.MonkeyPatch, output: type[io.StringIO], printed: str
):
    other.events = [{"content": "a\x1b[2Jb\tc"}]
    stdout = output()
    monkeypatch.setattr("sys.stdout", stdout)
    assert main(["chat", other.url, "--message", "Hello?"]) == 0
    assert stdout.getvalue() == printed


def test_without_a_terminal_the_input_is_the_question(
    other: ChatStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("Two\nlines?\n"))
    assert run(capsys, other.url, "--model", "large")[:2] == (0, "Hello.\n")
    assert (other.asked[0]["model"], other.asked[0]["messages"][-1]["content"]) == ("large", "Two\nlines?\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_no_text_is_refused(
    other: ChatStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, errors: str
):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8", errors))
    assert run(capsys, other.url) == (2, "", "headrace: standard input: not UTF-8 text\n")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["http://127.0.0.1:9", "--message", "x"], 1, "http://127.0.0.1:9/v1 cannot be reached"),
        (["{url}", "--message", "x", "--model", "huge"], 2, '--model = "huge": '),
        (["{url}", "--message", "  "], 2, "--message: "),
        (["{url}", "--message", "x", "--seed", "a"], 2, 'seed = "a": '),
        (["/no/such/model", "--message", "x"], 2, '"/no/such/model": no such directory'),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    other: ChatStandIn, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, words: str
):
    found, out, err = run(capsys, *(word.format(url=other.url) for word in argv))
    assert (found, out) == (code, "")
    assert err.startswith("headrace: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_key_is_never_shown(other: ChatStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_API_KEY", "sesame")
    other.refusal = (401, "the key sesame is wrong")
    code, _, err = run(capsys, other.url, "--message", "Hello?")
    assert code == 1
    assert "the key *** is wrong" in err


def test_an_unknown_chunk_is_no_reason_to_stop(other: ChatStandIn):
    events: list[dict[str, Any]] = [{"role": "assistant", "content": None}, {"refusal": None, "content": "Hi"}]
    other.events = events
    assert chat(other, "Hello?", CTRL_D)[0].startswith("Hi\n")
