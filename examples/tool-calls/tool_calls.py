"""A request, and the call of a function that fulfils it: `<tool_call>[{"name": ..., "arguments": {...}}]</tool_call>`.

The model sees a function and an example of its use. SmolLM2-135M-Instruct knows this form, but at temperature 1 it
seldom gets all of it right. There is credit for every part, so that the answers of a group have something to compare.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, get_args, get_type_hints

from headrace.environments import environment
from headrace.environments.chat import Tool
from headrace.environments.shipped.common import draw_tasks

SYSTEM = "You call functions. Answer the request with one call of a function, and nothing else.\n<tools>{tools}</tools>"
ONE_BLOCK = re.compile(r"\s*<tool_call>((?:(?!<tool_call>).)*)</tool_call>\s*", re.DOTALL)
LONGEST = 1000
"""Characters of an answer that is looked at."""


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]):
    """The weather of a city."""


def book_table(restaurant: str, people: int, hour: int):
    """Book a table in a restaurant."""


def send_message(person: str, text: str):
    """Send somebody a message."""


def set_timer(minutes: int):
    """Set the kitchen timer."""


def convert_money(amount: float, currency: Literal["euro", "dollar", "pound", "yen"]):
    """Convert an amount of money."""


def play_music(genre: Literal["jazz", "rock", "classical"], volume: int):
    """Play music of a genre."""


def find_hotel(city: str, nights: int, stars: int):
    """Find a hotel in a city."""


def set_temperature(room: Literal["kitchen", "bedroom", "office"], degrees: float):
    """Set the temperature of a room."""


REQUESTS: dict[Callable[..., None], str] = {
    get_weather: "What is the weather in {city}, in {unit}?",
    book_table: "Book a table for {people} at {restaurant}, at {hour} o'clock.",
    send_message: 'Send {person} the message "{text}".',
    set_timer: "Set a timer for {minutes} minutes.",
    convert_money: "How much is {amount} in {currency}?",
    play_music: "Play some {genre} at volume {volume}.",
    find_hotel: "Find a hotel with {stars} stars in {city} for {nights} nights.",
    set_temperature: "Set the {room} to {degrees} degrees.",
}
FUNCTIONS = {function.__name__: function for function in REQUESTS}
TEXTS = {
    "city": ("Paris", "London", "Berlin", "Rome", "Tokyo", "Madrid", "Oslo", "Vienna", "Lima", "Cairo", "Boston"),
    "restaurant": ("Luigi's", "The Oak", "Blue Door", "Casa Sol", "Green Garden", "Old Mill", "Red Lantern"),
    "person": ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Karen", "Leo"),
    "text": ("see you soon", "I am late", "call me back", "happy birthday", "lunch is ready", "good luck today"),
}


def rows(split: str = "train", num_tasks: int = 4000, seed: int = 0) -> Iterator[dict[str, Any]]:
    yield from draw_tasks(draw, split, num_tasks, seed)


def draw(rng: random.Random) -> dict[str, Any]:
    """`example` is another request for the same function, and its answer."""
    function = rng.choice(sorted(FUNCTIONS))
    request, answer = draw_call(function, rng)
    while (example := draw_call(function, rng)) == [request, answer]:
        pass
    return {"function": function, "example": example, "request": request, "answer": answer}


def draw_call(function: str, rng: random.Random) -> list[str]:
    """A request in words, and the call that fulfils it."""
    hints = get_type_hints(FUNCTIONS[function])
    values = {argument: draw_value(argument, hint, rng) for argument, hint in hints.items()}
    call = json.dumps([{"name": function, "arguments": values}])
    return [REQUESTS[FUNCTIONS[function]].format(**values), f"<tool_call>{call}</tool_call>"]


def draw_value(argument: str, hint: Any, rng: random.Random) -> str | int | float:
    if hint is int:
        return rng.randint(2, 12)
    if hint is float:
        return rng.randint(20, 60) / 2
    return rng.choice(TEXTS[argument] if hint is str else get_args(hint))


@lru_cache(maxsize=256)  # all rewards read the same text
def read_call(text: str) -> tuple[bool, dict[str, Any] | None]:
    """Whether the text is one tagged block and nothing else, and the call in it, if it is one."""
    block = ONE_BLOCK.fullmatch(text) if len(text) <= LONGEST else None
    if block is None:
        return False, None
    try:
        calls = json.loads(block[1])
    except (ValueError, RecursionError):
        return True, None
    call = calls[0] if isinstance(calls, list) and len(calls) == 1 else None
    whole = isinstance(call, dict) and call.keys() == {"name", "arguments"} and isinstance(call["arguments"], dict)
    return True, call if whole else None


def tag(text: str, row: Mapping[str, Any]) -> float:
    return 0.2 * read_call(text)[0]


def form(text: str, row: Mapping[str, Any]) -> float:
    return 0.2 * (read_call(text)[1] is not None)


def name(text: str, row: Mapping[str, Any]) -> float:
    return 0.2 * right_arguments(text, row["answer"])[0]


def arguments(text: str, row: Mapping[str, Any]) -> float:
    return 0.4 * right_arguments(text, row["answer"])[1]


def exact(text: str, row: Mapping[str, Any]) -> float:
    return float(right_arguments(text, row["answer"]) == (True, 1.0))


def right_arguments(text: str, answer: str) -> tuple[bool, float]:
    """Whether the right function is called, and the share of right arguments among those that are there or missing."""
    call, gold = read_call(text)[1], read_call(answer)[1]
    if call is None or gold is None or call["name"] != gold["name"]:
        return False, 0.0
    given, wanted = call["arguments"], gold["arguments"]
    right = sum(argument in given and given[argument] == value for argument, value in wanted.items())
    return True, right / len(given.keys() | wanted.keys())


@environment(data=rows, rewards=[tag, form, name, arguments], metrics=[exact], raw=True)
def tool_calls(row: dict[str, Any]) -> list[dict[str, str]]:
    offered = json.dumps([Tool(FUNCTIONS[row["function"]]).schema["function"]])
    request, call = row["example"]
    return [
        {"role": "system", "content": SYSTEM.format(tools=offered)},
        {"role": "user", "content": request},
        {"role": "assistant", "content": call},
        {"role": "user", "content": row["request"]},
    ]
