"""Write trl.json: what TRL 1.16.0 computes for the batch of tests/trainer/dpo_batch.py.

TRL is not a dependency. From the root of the repository:

    pip install --no-deps --target FOLDER trl==1.16.0
    PYTHONPATH=FOLDER:. python tests/data/dpo/make_trl_numbers.py
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from headrace.trainer.tiny import write_tiny_settings
from tests.trainer.dpo_batch import PAIRS, POLICY, REFERENCE, write_model

BETAS = {"sigmoid": 0.3, "ipo": 0.7}
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")


def main() -> None:
    results = []
    with TemporaryDirectory() as folder:
        write_tiny_settings(Path(folder) / "tokenizer")
        models = {seed: write_model(Path(folder) / str(seed), seed) for seed in (POLICY, REFERENCE)}
        tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "tokenizer")
        rows = datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
        for loss_type, beta in BETAS.items():
            policy, reference = (AutoModelForCausalLM.from_pretrained(models[seed]) for seed in (POLICY, REFERENCE))
            options = {"loss_type": loss_type, "beta": beta, "bf16": False, "gradient_checkpointing": False}
            args = trl.DPOConfig(output_dir=folder, use_cpu=True, report_to="none", **options)
            trainer = trl.DPOTrainer(policy, reference, args, train_dataset=rows, processing_class=tokenizer)
            for reference_free in (False, True):
                trainer.precompute_ref_logps = reference_free  # then a uniform reference is one whose logprobs are 0
                zeros = {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0} if reference_free else {}
                inputs = DataCollatorForPreference(pad_token_id=2)([{**pair, **zeros} for pair in PAIRS])
                trainer.model.train().zero_grad()
                loss = trainer.compute_loss(trainer.model, inputs)
                loss.backward()
                norm = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm().item()
                metrics = {name: trainer._metrics["train"][name][-1] for name in METRICS}
                result = {"loss_type": loss_type, "beta": beta, "reference_free": reference_free}
                results.append({**result, "loss": loss.item(), "grad_norm": norm, "metrics": metrics})
    content = {"trl": trl.__version__, "results": results}
    Path(__file__).with_name("trl.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
