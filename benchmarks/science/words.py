"""Repeat a word, or write it backwards if it begins with one of the first letters; 1 if exact, else 0.

The start of examples/reverse-text copies three words in four and never looks at the first letter: half of the tasks are
easy for it, the other half is hard, and both look alike.
"""

from headrace.environments.base import Context
from headrace.environments.chat import Chat
from headrace.environments.shipped.reverse_text import ReverseText
from headrace.rollout.types import Rollout, Task

REVERSED = "abcdefghijklm"
"""First letters of words to reverse: half of the alphabet."""


class TwoKinds(ReverseText):
    async def run(self, task: Task, context: Context) -> list[Rollout]:
        word = task.data["word"]
        chat = Chat(context, word)
        await chat.reply()
        is_reversed = word[0] in REVERSED
        exact = chat.text == (word[::-1] if is_reversed else word)
        return [chat.rollout({"exact": float(exact)}, {"reversed": float(is_reversed)})]
