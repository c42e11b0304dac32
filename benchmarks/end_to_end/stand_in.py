"""A stand-in for a trained model: random weights in the shape of Qwen2.5-0.5B, and completions of realistic lengths.

    python -m benchmarks.end_to_end.stand_in DIRECTORY

With random weights the end-of-sequence token practically never comes. Forcing lengths would need support in every
engine, so the model itself stops: its tokens are in `STAGES` stages, a token is followed by one of the next stage with
probability `ADVANCE` and else by one of its own, and the last stage is followed by the end. The sum of six geometric
lengths, cut at 512, has mean 283, standard deviation 107 and 5% cut, as GSM8K completions of a 0.5B model in training
(mean 280, deviation 104, 5% cut: `benchmarks/data/traffic_lengths.json`).

How it is built into a model with tied embeddings: hidden dimensions 0 to `STAGES` + 1 are written by no layer but the
last. An embedding has `SIGNAL` in the dimension of its stage, and in dimension 0 what keeps ids without a token
improbable. So the head favours the current stage; a neuron per stage in the last MLP adds to the dimension of the next
one. Half of the other dimensions are what layers read, the other half is what the head reads, so that no token repeats
itself. Layers are otherwise random, and take the time that trained ones take. The probabilities hold during training:
at a learning rate of 2e-6 a step changes the logits of stages by less than .02.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from benchmarks.models import qwen3_config

PROBLEMS = Path(__file__).parents[1] / "data/gsm8k/train.jsonl"
STAGES = 6
MEAN_TOKENS = 287
"""Mean length of a completion before the cut at 512."""
ADVANCE = STAGES / MEAN_TOKENS
SIGNAL = 128.0
READ_DEVIATION = 4.0
"""Standard deviation of what layers read of an embedding. Beside these two, what the layers add is so small that the
scale of the final norm, and so the probabilities, hardly depend on the context or on training."""
STAY_LOGIT = 12.0
"""Logit of the current stage above that of other stages."""
TOKEN_LOGIT_DEVIATION = 0.25
"""Standard deviation of the logits of tokens of one stage."""
ROUNDS = 8
"""Forwards for the calibration."""
SHORT_CONTEXT = 48
"""Tokens; prompts are longer."""
TOKENS = 4000
"""Size of the tokenizer; with it the mean prompt of GSM8K has 117 tokens, as with Qwen2.5's."""
END, START, PADDING = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_stand_in(directory: Path, config: Any = None) -> None:
    """Write the model and its tokenizer; `config` is another configuration of Qwen2, e.g. a small one for tests."""
    from transformers import AutoModelForCausalLM

    tokenizer = train_tokenizer()
    config = config or qwen3_config("0.5b")
    config.eos_token_id, config.pad_token_id = (tokenizer.convert_tokens_to_ids(token) for token in (END, PADDING))
    config.bos_token_id = None
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stages = stages_of_tokens(tokenizer, config.vocab_size).to(device)
    with torch.no_grad():
        build_stages(model, stages)
        calibrate(model, stages)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer of GSM8K's text, with single digits and Qwen's chat format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    problems = [json.loads(line) for line in PROBLEMS.read_text().splitlines()]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=[PADDING, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([problem[key] for problem in problems for key in ("question", "answer")], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PADDING, chat_template=TEMPLATE, padding_side="left"
    )


def stages_of_tokens(tokenizer: Any, vocab_size: int) -> torch.Tensor:
    """Return the stage of every id, from 1: `STAGES` + 1 for the end, 0 for ids that are never sampled."""
    stages = torch.zeros(vocab_size, dtype=torch.long)
    stages[: len(tokenizer)] = 1 + torch.arange(len(tokenizer)) % STAGES
    for token, stage in ((START, 0), (PADDING, 0), (END, STAGES + 1)):
        stages[tokenizer.convert_tokens_to_ids(token)] = stage
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=False
    )
    stages[prompt[-1]] = 1  # what is sampled first follows it
    return stages


def build_stages(model: Any, stages: torch.Tensor) -> None:
    signals, hidden = STAGES + 2, model.config.hidden_size
    read = slice(signals, hidden // 2)
    embeddings = model.get_input_embeddings().weight
    embeddings[:, :signals] = 0
    embeddings[:, 0] = torch.where(stages > 0, SIGNAL / 2, -SIGNAL)
    sampled = stages.nonzero().squeeze(1)
    embeddings[sampled, stages[sampled]] = SIGNAL
    embeddings[:, read] = READ_DEVIATION * torch.randn_like(embeddings[:, read])
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[:signals] = 0
        layer.mlp.down_proj.weight[:signals] = 0
        layer.input_layernorm.weight[:signals] = 0
        layer.post_attention_layernorm.weight[:signals] = 0
    last = model.model.layers[-1]
    last.post_attention_layernorm.weight[1 : STAGES + 1] = 1
    for projection in (last.mlp.gate_proj, last.mlp.up_proj):
        projection.weight[:, 1 : STAGES + 1] = 0
        projection.weight[:STAGES] = 0
        projection.weight[range(STAGES), range(1, STAGES + 1)] = 0.25
    last.mlp.down_proj.weight[:, :STAGES] = 0
    last.mlp.down_proj.weight[range(2, STAGES + 2), range(STAGES)] = 2.0
    last.mlp.down_proj.weight[hidden // 2 :] *= 10  # the head sees more of the layers than of the token itself
    model.model.norm.weight[:signals] = 2 * STAY_LOGIT / SIGNAL**2
    model.model.norm.weight[read] = 0


def calibrate(model: Any, stages: torch.Tensor) -> None:
    """Set what depends on the sizes of activations, by the logits that follow random tokens."""
    embeddings, norm = model.get_input_embeddings().weight, model.model.norm.weight
    down, signals, hidden = model.model.layers[-1].mlp.down_proj.weight, STAGES + 2, model.config.hidden_size
    members = [(stages == stage).nonzero().squeeze(1) for stage in range(signals)]
    tokens = torch.cat([part[torch.randperm(len(part), device=part.device)[:32]] for part in members[1:-1]])
    tokens = tokens[torch.randperm(len(tokens), device=tokens.device)]
    own, wanted_odds = stages[tokens], math.log(ADVANCE / (1 - ADVANCE))
    own[:SHORT_CONTEXT] = 0  # not looked at: attention over few tokens is larger

    def log_odds(states: torch.Tensor, stage: int, other: int) -> float:
        """Return the log of the mean odds of the next token's stage, after tokens of `stage`: `other` to `stage`."""
        mass, own_mass = (
            (states[own == stage] @ embeddings[members[each]].float().T).logsumexp(1) for each in (other, stage)
        )
        return float((mass - own_mass).exp().mean().log())

    for _ in range(ROUNDS):
        states = model.model(tokens[None]).last_hidden_state[0].float()
        token_logits = states[:, hidden // 2 :] @ embeddings[members[1], hidden // 2 :].float().T
        norm[hidden // 2 :] *= TOKEN_LOGIT_DEVIATION / token_logits.std()
        norm[:signals] *= -STAY_LOGIT / log_odds(states, 1, 3)
        for stage in range(1, STAGES + 1):
            without_neuron = math.log(len(members[stage + 1]) / len(members[stage])) - STAY_LOGIT
            added = log_odds(states, stage, stage + 1) - without_neuron
            down[stage + 1, stage - 1] *= (wanted_odds - without_neuron) / added


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    write_stand_in(parser.parse_args().directory)
