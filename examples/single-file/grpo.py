"""GRPO in one file: a language model learns an environment by trial, in one process, one step after another.

    python examples/single-file/grpo.py

The file reads from top to bottom as a step runs. `sample` draws replies from the policy, `play` lets the environment
turn them into rollouts with rewards, `credit` makes advantages of rewards, `loss_of` and `backward` make a gradient of
advantages, `update` takes the step, and `train` repeats it. The maths of credit, packing and loss is the package's own.

Words: a prompt is a state s_1; a reply is the tokens a_1 .. a_n sampled after it, s_t the prompt and all tokens before
a_t. The policy is pi(a | s). The replies to one prompt are a group; each ends with a reward r.

Left out of GRPO on purpose: the KL to a reference model (one more model in memory), and, unless --std asks for it, the
division of advantages by the group's standard deviation (it weighs nearly solved and nearly hopeless prompts up). Left
out of Headrace: what README.md lists, tools and several agents among it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from headrace.config.model import ModelConfig
from headrace.environments.base import Environment, Reply, tasks_of
from headrace.environments.registry import load_environment
from headrace.errors import BadInput, Failure
from headrace.launch.origin import resolve
from headrace.orchestrator.conversation import Prompter
from headrace.rollout.checks import check_rollout
from headrace.rollout.credit import center, standardize
from headrace.rollout.merge import merge_turns
from headrace.rollout.packing import Bin, Cost, pack_for_worker
from headrace.rollout.types import Message, Rollout, Sample, Task, Turn
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.loss import Loss, PackedInputs
from headrace.trainer.losses import policy_loss
from headrace.trainer.model_files import ModelFiles

START = Path(__file__).parents[1] / "reverse-text" / "sft.toml"
RENDERER = {"name": "qwen3", "enable_thinking": False, "thinking_retention": "all"}
HELD_OUT = {"split": "eval", "num_tasks": 128}
LOSSES = ("default", "ipo", "ppo_clip", "gspo", "cispo", "icepop", "reinforce")


def log_policy(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """log pi(. | s) = log-softmax(logits / temperature), over the whole vocabulary, in float32.

    Sampler and loss both call this, temperature and all, so the ratio of their probabilities is 1 until weights change.
    """
    return torch.log_softmax(logits.float() / temperature, -1)


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: Sequence[list[int]], limits: Sequence[int], stops: set[int], temperature: float
) -> list[tuple[list[int], list[float]]]:
    """A reply to each prompt, with log pi of its tokens, all prompts in one batch: a_t ~ pi(. | s_t).

    Prompts are padded on the left, where the mask hides it, so that every reply begins in the same column. A reply ends
    with a stop token or at its limit; the batch goes on until all have ended. Temperature 0 takes the likeliest token.
    """
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts], device=model.device)
    seen = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device)
    cache = DynamicCache(config=model.config)
    replies: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    going = set(range(len(prompts)))
    while going:
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = model(
            input_ids=tokens, attention_mask=seen, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        logprobs = log_policy(output.logits[:, -1], temperature or 1.0)
        tokens = logprobs.exp().multinomial(1) if temperature else logprobs.argmax(-1, keepdim=True)
        seen = torch.cat([seen, torch.ones_like(tokens)], -1)
        chosen = zip(tokens[:, 0].tolist(), logprobs.gather(-1, tokens)[:, 0].tolist(), strict=True)
        for index, (token, logprob) in enumerate(chosen):
            if index in going:
                replies[index][0].append(token)
                replies[index][1].append(logprob)
                if token in stops or len(replies[index][0]) == limits[index]:
                    going.remove(index)
    return replies


def answer(
    model: PreTrainedModel, prompter: Prompter, prompts: Sequence[list[int]], limits: Sequence[int], temperature: float
) -> list[Reply]:
    """A reply to each prompt: the message that the environment reads, and the exact tokens that are trained."""
    stops = set(prompter.parser.stop_token_ids)
    replies = []
    for prompt, (ids, logprobs) in zip(prompts, sample(model, prompts, limits, stops, temperature), strict=True):
        ended = "stop" if ids[-1] in stops else "length"
        turn = Turn(np.array(prompt), np.array(ids), np.array(logprobs), np.zeros(len(ids)), temperature or 1.0, ended)
        message, _, raw = prompter.parser.parse(prompt, ids, ())
        replies.append(Reply(message, turn, raw=raw))
    return replies


async def play(
    environment: Environment,
    tasks: Sequence[Task],
    group_size: int,
    model: PreTrainedModel,
    prompter: Prompter,
    temperature: float,
    longest: int,
) -> list[list[Rollout]]:
    """A group of rollouts for each task: `group_size` episodes of it, all episodes side by side.

    An environment is a coroutine that requests replies. All waiting requests are answered in one batch.
    The reward of rollout i is the sum of what the environment gave it: r_i = sum over k of r_ik.
    """
    waiting: list[tuple[list[int], int, asyncio.Future[Reply]]] = []

    async def chat(messages: Sequence[Message], tools: Sequence[Any] = (), max_tokens: int | None = None) -> Reply:
        if tools:
            raise BadInput(f"{type(environment).__name__} has tools, which this file leaves out: use `headrace rl`")
        prompt = (await prompter.build(list(messages), tools, None)).ids
        limit = min(prompter.seq_len - len(prompt), longest, max_tokens or longest)
        waiting.append((prompt, limit, asyncio.get_running_loop().create_future()))
        return await waiting[-1][-1]

    line: Any = SimpleNamespace(chat=chat)
    episodes = [asyncio.create_task(environment.run(task, line)) for task in tasks for _ in range(group_size)]
    running = set(episodes)
    while running:
        _, running = await asyncio.wait(running, timeout=0.001)  # each goes on until it asks, or is over
        if waiting:
            prompts, limits, futures = zip(*waiting, strict=True)
            waiting.clear()
            for future, reply in zip(futures, answer(model, prompter, prompts, limits, temperature), strict=True):
                future.set_result(reply)
    played = await asyncio.gather(*episodes)
    if any(len(rollouts) != 1 for rollouts in played):
        raise BadInput(
            f"{type(environment).__name__} has several agents, which this file leaves out: use `headrace rl`"
        )
    groups = [[rollout for [rollout] in played[at : at + group_size]] for at in range(0, len(played), group_size)]
    for group in groups:
        if environment.scores_groups:
            await environment.score_group(group)
        for rollout in group:
            check_rollout(rollout, scored_later=False)  # adds its rewards up
            if rollout.error is not None:
                raise Failure(f"a rollout of {type(environment).__name__} failed: {rollout.error.detail}")
    return groups


def credit(groups: Sequence[Sequence[Rollout]], std: bool = False) -> list[Sample]:
    """Each reply as a sample with its credit: how much better it was than its group.

        A_i = r_i - mean(r)                      or, with `std`,  (r_i - mean(r)) / (std(r) + 1e-6)

    Every token that was sampled in rollout i gets A_i. The group's mean stands for the value of the prompt, so that no
    critic is needed. Where all of a group earned the same, each A_i is 0: such replies teach nothing and are left out.
    """
    samples = []
    for group in groups:
        rewards = np.array([rollout.reward for rollout in group])
        for rollout, advantage in zip(group, standardize(rewards) if std else center(rewards), strict=True):
            if advantage != 0:
                for one in merge_turns(rollout.turns):  # one sample, unless later turns rewrote earlier ones
                    one.set_stream("advantages", np.where(one.mask, advantage, 0.0))
                    samples.append(one)
    return samples


def loss_of(model: PreTrainedModel, rows: Sequence[Bin], policy_loss: Loss) -> Tensor:
    """The policy loss, added up over the sampled tokens of some rows. For one token, by default:

        rho  = pi(a_t | s_t) / pi_sampled(a_t | s_t)         the policy as it is now, and as it was sampled from
        keep = 0 where pi - pi_sampled > 0.2 and A > 0, or < -0.2 and A < 0; else 1
        loss = -keep * A * rho + 0.001 * log(rho)**2

    At rho = 1 its gradient is that of -A * log pi(a_t | s_t), the policy gradient. Mask and square hold a token back
    that has moved, which only happens when a batch is used more than once (--updates).

    A row holds whole sequences end to end. transformers keeps them apart where positions start at 0 again, as long as
    there is no cache. The logits of column j are about the token of column j + 1.
    """

    def column(values: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(values)).to(model.device)

    tokens, positions = column([row.token_ids for row in rows]).long(), column([row.position_ids for row in rows])
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, :-1]
    logprobs = log_policy(logits, column([row.temperatures for row in rows])[:, 1:, None])
    inputs = PackedInputs(
        trainer_logprobs=logprobs.gather(-1, tokens[:, 1:, None]).flatten(),
        inference_logprobs=column([row.logprobs for row in rows])[:, 1:].flatten(),
        ref_logprobs=None,
        advantages=column([row.streams["advantages"] for row in rows])[:, 1:].flatten(),
        loss_mask=column([row.mask for row in rows])[:, 1:].flatten(),
        sequences=((positions == 0).flatten().cumsum(0) - 1).view_as(positions)[:, 1:].flatten(),
    )
    return policy_loss(inputs).loss


def backward(model: PreTrainedModel, samples: list[Sample], policy_loss: Loss, seq_len: int, at_once: int) -> float:
    """Add the gradient of the batch's loss to the parameters' own; returns the loss.

        L = (1 / M) * sum of the loss of every sampled token                       M: sampled tokens of the whole batch

    One M for all, and not one for each reply: a token of a long reply counts as much as one of a short reply, and the
    gradient does not depend on how many rows run `at_once`.
    """
    rows = pack_for_worker(0, samples, seq_len, workers=1, cost=Cost(a=1, b=0), pad_to_multiple_of=seq_len)
    trained = sum(int(row.mask.sum()) for row in rows)
    total = 0.0
    for start in range(0, len(rows), at_once):
        loss = loss_of(model, rows[start : start + at_once], policy_loss) / trained
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, max_grad_norm: float = 1.0) -> float:
    """theta <- theta - lr * AdamW(g * min(1, max_grad_norm / |g|)), and a new gradient begins; returns |g|."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def load_policy(start: Path, renderer: dict[str, Any], seq_len: int) -> tuple[PreTrainedModel, Prompter, Path]:
    """The model, what turns messages into its tokens, and its directory.

    An SFT run file is run first, unless its model is in the cache: RL selects among habits, and needs some to start.
    """
    directory = Path(resolve(ModelConfig(sft=start) if start.suffix == ".toml" else ModelConfig(name=str(start))))
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # without dropout: what is trained was sampled
    tokenizer = Tokenizer(directory)
    return model, Prompter(make_renderer(directory, tokenizer, **renderer), tokenizer, seq_len), directory


async def evaluate(args: argparse.Namespace, model: PreTrainedModel, prompter: Prompter) -> float:
    """The mean reward of the likeliest reply to each held-out task."""
    environment = load_environment(args.env, args.eval_args)
    await environment.start()
    groups = await play(environment, tasks_of(environment, args.env), 1, model, prompter, 0.0, args.max_tokens)
    await environment.close()
    return float(np.mean([rollout.reward for group in groups for rollout in group]))


async def train(args: argparse.Namespace, model: PreTrainedModel, prompter: Prompter) -> None:
    """The loop, between two evaluations: draw tasks, play them, credit, update, and tell the reward of the step."""
    before = None if args.eval_args is None else await evaluate(args, model, prompter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    environment = load_environment(args.env, args.env_args)
    tasks = tasks_of(environment, args.env)
    await environment.start()
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        drawn = random.sample(tasks, min(args.prompts, len(tasks)))
        groups = await play(environment, drawn, args.group_size, model, prompter, args.temperature, args.max_tokens)
        samples = credit(groups, args.std)
        norm = 0.0
        for _ in range(args.updates if samples else 0):
            backward(model, samples, policy_loss(args.loss), args.seq_len, args.rows)
            norm = update(model, optimizer)
        rollouts = [rollout for group in groups for rollout in group]
        reward, tokens = np.mean([(rollout.reward, rollout.completion_tokens) for rollout in rollouts], 0)
        trained, seconds = f"{len(samples)} of {len(rollouts)} trained", time.perf_counter() - began
        line = (
            f"step {step:3d}   reward {reward:.3f}   tokens {tokens:.1f}   {trained}   |g| {norm:.3f}   {seconds:.1f} s"
        )
        print(line, flush=True)
    await environment.close()
    if before is not None:
        print(f"held-out reward {before:.3f} -> {await evaluate(args, model, prompter):.3f}")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The defaults are those of examples/reverse-text, which `make demo` runs."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=START, help="a model directory, or an SFT run file that makes one")
    add("--renderer", type=json.loads, default=RENDERER, help="how messages become tokens; {} is by model family")
    add("--env", default="reverse-text", help="the environment, by its id in a run file")
    add("--env-args", type=json.loads, default={}, help="its args, as JSON")
    add("--eval-args", type=json.loads, default=HELD_OUT, help="its args for evaluation; null: none")
    add("--output", type=Path, default=Path("outputs/single-file"), help="where the trained model goes")
    add("--steps", type=int, default=50)
    add("--prompts", type=int, default=32, help="tasks drawn for a step")
    add("--group-size", type=int, default=8, help="replies to each of them")
    add("--temperature", type=float, default=1.0)
    add("--max-tokens", type=int, default=16, help="of a reply")
    add("--seq-len", type=int, default=64, help="tokens of a prompt with its reply, and of a row")
    add("--rows", type=int, default=32, help="rows in one forward pass")
    add("--loss", default="default", choices=LOSSES, help="see headrace.trainer.loss")
    add("--std", action="store_true", help="divide advantages by the group's standard deviation")
    add("--updates", type=int, default=1, help="optimizer steps on each batch")
    add("--lr", type=float, default=3e-4)
    add("--seed", type=int, default=0)
    return parser.parse_args(words)


def main(args: argparse.Namespace) -> None:
    """Load, train, save."""
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    model, prompter, directory = load_policy(args.model, args.renderer, args.seq_len)
    asyncio.run(train(args, model, prompter))
    model.save_pretrained(args.output)
    ModelFiles(directory).write(args.output, torch.float32)  # the tokenizer and the chat format, too
    print(f"the model is in {args.output}")


if __name__ == "__main__":
    main(arguments())
