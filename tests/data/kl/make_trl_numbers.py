"""Write trl.json: what the GRPO of TRL 1.16.0 computes for the batch of tests/trainer/kl_batch.py.

TRL is not a dependency. From the root of the repository:

    pip install --no-deps --target FOLDER trl==1.16.0
    PYTHONPATH=FOLDER:. python tests/data/kl/make_trl_numbers.py

`plain`: use_bias_correction_kl = False. `corrected`: TRL's default, which multiplies k3 by the importance ratio.
Loss, kl and gradient are TRL's own; per_token_kl is the formula applied here to TRL's logprobs, without the ratio.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.trainer.tiny import write_tiny_settings
from tests.trainer.kl_batch import (
    ADVANTAGES,
    COEF,
    COMPLETIONS,
    EPSILON,
    POLICY,
    PROMPT,
    REFERENCE,
    SAMPLED,
    write_model,
)

LENGTH = max(map(len, COMPLETIONS))


def main() -> None:
    with TemporaryDirectory() as folder:
        write_tiny_settings(Path(folder) / "tokenizer")
        models = {seed: write_model(Path(folder) / str(seed), seed) for seed in (POLICY, REFERENCE)}
        args = trl.GRPOConfig(
            output_dir=folder, use_cpu=True, report_to="none", bf16=False, gradient_checkpointing=False,
            loss_type="bnpo", beta=COEF, epsilon=EPSILON, per_device_train_batch_size=4, num_generations=4,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(models[POLICY]),
            lambda completions, **_: [0.0] * len(completions),
            args,
            train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * 4),
            processing_class=AutoTokenizer.from_pretrained(Path(folder) / "tokenizer"),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.ref_model.load_state_dict(AutoModelForCausalLM.from_pretrained(models[REFERENCE]).state_dict())
        inputs = padded_batch()
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            policy_logps, reference_logps = (
                trainer._get_per_token_logps_and_entropies(model, ids, mask, LENGTH)[0]
                for model in (trainer.model.eval(), trainer.ref_model.eval())
            )
        inputs["ref_per_token_logps"] = reference_logps
        results = {}
        for name, corrects in (("plain", False), ("corrected", True)):
            trainer.args.use_bias_correction_kl = corrects
            trainer.model.train().zero_grad()
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm().item()
            results[name] = {"loss": loss.item(), "kl": trainer._metrics["train"]["kl"][-1], "grad_norm": norm}
    gaps = reference_logps - policy_logps
    per_token = [row[: len(c)].tolist() for row, c in zip(gaps.exp() - gaps - 1, COMPLETIONS, strict=True)]
    content = {"trl": trl.__version__, "per_token_kl": per_token, **results}
    Path(__file__).with_name("trl.json").write_text(json.dumps(content, indent=1) + "\n")


def padded_batch() -> dict[str, torch.Tensor]:
    def padded(rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (LENGTH - len(row))] for row in rows])

    prompts = torch.tensor([PROMPT] * len(COMPLETIONS))
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": padded(COMPLETIONS),
        "completion_mask": padded([[1] * len(completion) for completion in COMPLETIONS]),
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": padded([SAMPLED[: len(completion)] for completion in COMPLETIONS]),
    }


if __name__ == "__main__":
    main()
