"""Write a word backwards, after any number of superfluous words: only the last word counts."""

import random
from collections.abc import Iterator

from headrace.environments.base import Context, Demonstration
from headrace.environments.chat import Chat
from headrace.environments.shipped.common import reply_similarity
from headrace.environments.shipped.reverse_text import ReverseText
from headrace.rollout.types import Rollout, Task


class Wordy(ReverseText):
    async def run(self, task: Task, context: Context) -> list[Rollout]:
        word = task.data["word"]
        chat = Chat(context, word)
        await chat.reply()
        answer = chat.text.rpartition(" ")[2]
        return [chat.rollout({"similarity": reply_similarity(answer, word[::-1])})]

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        rng = random.Random(f"fillers-{seed}")
        for shown in super().demonstrations(seed):
            word, answer = (message["content"] for message in shown.messages)
            reply = " ".join([word] * rng.randint(0, 4) + [answer])
            yield Demonstration([shown.messages[0], {"role": "assistant", "content": reply}])
