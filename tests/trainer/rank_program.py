"""Takes a step on each batch of a directory and saves the results: on one rank in a test, on two as a program.

The program forks into its ranks, since importing torch takes seconds; torchrun's variables make them ranks.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import headrace.runfile  # noqa: F401 (registers the losses)
from headrace.config.trainer import TrainerConfig
from headrace.inference.schema import LatentParams
from headrace.rollout.batch import read_batch
from headrace.rollout.packing import pack, pack_for_worker
from headrace.trainer.loss import ce_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.ranks import Ranks, destroy_process_group
from headrace.trainer.reference import ReferenceWeights
from headrace.trainer.rl import make_losses
from headrace.trainer.step import TrainStep
from headrace.trainer.token_table import write_token_table

LR = 1e-3
VARIANTS: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}, "latents": LatentParams(), "router_replay": "replay"}
"""Options of `PackedModel`, by name."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Keeping(Optimizer):
    """Keeps the parameters and the gradients of the last step, as they were before clipping."""

    def step(self, lr: float) -> float:
        self.before = {f"before.{name}": whole(p.detach()).clone() for name, p in self.parameters.items()}
        self.gradients = {f"gradient.{name}": whole(p.grad).clone() for name, p in self.parameters.items()}
        return super().step(lr)


def main(model_directory: Path, batches: Path, output: Path, **options: Any) -> None:
    torch.set_num_threads(1)
    ranks = Ranks()
    for path in sorted(batches.iterdir()):
        model = PackedModel(model_directory, ranks, lm_head_chunk=16, **options)
        optimizer = Keeping(model.named_parameters())
        kinds = {**make_losses(TrainerConfig()), "ce": ce_loss}
        reference = ReferenceWeights(model)
        for tensor in reference.tensors.values():
            tensor.mul_(1.1)
        step = TrainStep(model, optimizer, kinds, micro_batch_tokens=48, reference=reference)
        batch = read_batch(path)
        samples, envs = [entry.sample for entry in batch.samples], [entry.env for entry in batch.samples]
        bins = pack(samples, 32)
        if ranks.size > 1:
            bins = pack_for_worker(ranks.index, samples, 32, ranks.size, model.cost)
        result = step.run(bins, LR, envs=envs, traced=True)
        assert result is not None and result.trace is not None
        write_token_table(output / f"{path.name}.tokens", result.trace, batch, ranks)
        after = {f"after.{name}": whole(p.detach()) for name, p in model.named_parameters().items()}
        tensors = {**optimizer.before, **optimizer.gradients, **after}
        if ranks.is_first:
            save_file({name: t.contiguous() for name, t in tensors.items()}, output / f"{path.name}.safetensors")
            report = {"metrics": result.metrics, "norm": result.grad_norm, "tokens": result.tokens}
            (output / f"{path.name}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    other = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(other == 0))
    main(*map(Path, sys.argv[1:4]), **{name: VARIANTS[name] for name in sys.argv[4:]})
    destroy_process_group()  # else gloo's threads, still there when the interpreter ends, may abort it
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
