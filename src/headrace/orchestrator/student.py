"""The policy as a student: how it would have said what its teacher said in words.

Everything is written in the policy's own chat format, and read back in it: what an environment gets to see, and answers
to, is what the policy will be trained to say. Such tokens carry no version, so they never age, and no logprobs: no
policy sampled them. What a policy must not learn to say costs the episode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from renderers.base import ParsedResponse

from headrace.environments.base import EpisodeError, Reply, ToolCall
from headrace.orchestrator.prompting import WRITE_AT_ONCE, Prompter, Tools, call_of
from headrace.rollout.types import NOT_SAMPLED, Message, Turn
from headrace.text.answer import Answer, answer_tokens, with_plain_words
from headrace.text.prompt import Prompt
from headrace.text.replies import assistant_message

TEACHER = "teacher"
"""The reason of an episode that its teacher ended."""
IDENTITIES: tuple[Callable[[int, str], str], ...] = (
    lambda number, name: f"call_{number}",
    lambda number, name: f"functions.{name}:{number}",
)
"""How tool calls are known: as elsewhere in a run, or as in Kimi's format, which names the tool nowhere else.

Never as the teacher's server calls them: that is another name in every run.
"""


class Student:
    def __init__(self, prompter: Prompter) -> None:
        self._prompter = prompter
        self._control = prompter.tokenizer.control_tokens

    async def say(self, said: Reply, prompt: Prompt, tools: Tools, first_call: int) -> Reply:
        """The teacher's reply with the student's tokens; tool calls are numbered from `first_call`."""
        if len(said.raw) > WRITE_AT_ONCE:
            return await self._prompter.in_pool(self._say, said, prompt, tools, first_call)
        return self._say(said, prompt, tools, first_call)

    def _say(self, said: Reply, prompt: Prompt, tools: Tools, first_call: int) -> Reply:
        _check_usable(said.tool_calls)
        names, ended = [call.name for call in said.tool_calls], not said.truncated
        for identity in IDENTITIES if names else IDENTITIES[:1]:
            meant = [
                ToolCall(identity(first_call + number, call.name), call.name, call.arguments)
                for number, call in enumerate(said.tool_calls)
            ]
            message = assistant_message(said.message["content"], meant, said.message.get("reasoning_content", ""))
            answer = self._write(message, tools, ended=ended)
            asked = prompt.ids[: len(prompt.ids) - answer.dropped]
            read = self._read(answer, asked, tools)
            calls = [call_of(call, same.id) for call, same in zip(read.tool_calls, meant, strict=False)]
            is_text = not tools and not names  # whatever looks like a call
            if is_text or [call.name for call in read.tool_calls] == names:
                _check_usable(calls)
                if not (is_text and read.tool_calls):
                    message = assistant_message(read.content or "", calls, read.reasoning_content or "")
                return Reply(message, self._turn(answer, prompt, ended), calls, self._prompter.raw(asked, answer.ids))
        raise EpisodeError(
            TEACHER,
            f"the teacher called {names}, in the policy's chat format it called {[c.name for c in read.tool_calls]}: "
            "its server must tell tool calls from text (vLLM: --enable-auto-tool-choice, --tool-call-parser)",
        )

    def _write(self, message: Message, tools: Tools, *, ended: bool) -> Answer:
        renderer, tokenizer = self._prompter.renderer, self._prompter.tokenizer
        try:
            answer = answer_tokens(renderer, tokenizer, message, tools, ended=ended)
            plain = answer_tokens(renderer, tokenizer, with_plain_words(message), tools, ended=ended)
        except Exception as error:  # templates raise what they like about messages they cannot render
            raise EpisodeError(TEACHER, f"the policy's chat format has no way to say what was said: {error}") from error
        if not answer.ids:
            raise EpisodeError(TEACHER, "the teacher was cut off before it said anything: raise sampling.max_tokens")
        self._check_control(answer.ids, plain.ids, ended)
        return answer

    def _check_control(self, ids: list[int], plain: list[int], ended: bool) -> None:
        """Raise where the policy would learn to go on after its end, or to write what only its chat format may."""
        body = ids[:-1] if ended else ids
        early = [token for token in body if token in self._prompter.stop_token_ids]
        forged = Counter(filter(self._control.__contains__, ids)) - Counter(filter(self._control.__contains__, plain))
        if early or forged:
            token = self._prompter.tokenizer.decode([*early, *forged][:1])
            raise EpisodeError(
                TEACHER, f"what the teacher said has {token} within it, which the policy's chat format would act upon"
            )

    def _read(self, answer: Answer, asked: list[int], tools: Tools) -> ParsedResponse:
        try:
            return self._prompter.read(asked, answer.ids, tools)
        except (ValueError, RecursionError) as error:  # JSON of any depth, and numbers of any length
            raise EpisodeError(TEACHER, f"the policy's chat format cannot read what was said: {error}") from error

    def _turn(self, answer: Answer, prompt: Prompt, ended: bool) -> Turn:
        """What goes beyond `seq_len` is cut off, as it would be from a sampled reply."""
        given = len(prompt.ids) - answer.dropped
        ids = np.array(answer.ids[: self._prompter.room(given)], np.int32)
        return Turn(
            prompt.array[:given],
            ids,
            np.zeros(len(ids), np.float32),
            np.full(len(ids), NOT_SAMPLED, np.int32),
            1.0,  # the teacher's temperature is not that of what the policy learns
            "stop" if ended and len(ids) == len(answer.ids) else "length",
            prompt_roles=None if prompt.roles is None else prompt.roles[:given],
        )


def _check_usable(calls: Sequence[ToolCall]) -> None:
    """Raise for a call that cannot be run, as the teacher made it or as the policy's chat format reads it."""
    for call in calls:
        if call.error:
            raise EpisodeError(TEACHER, f"nobody should learn this call of {call.name or 'a tool'}: {call.error}")
