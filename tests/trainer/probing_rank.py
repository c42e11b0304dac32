"""What each rank of a test runs under torchrun: a probe of a batch, and a look at the parameters after it."""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from headrace.rollout.batch import read_batch
from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.trainer.probe import write_probe
from headrace.trainer.ranks import Ranks, destroy_process_group
from headrace.transport.batches import ProbeStore


def main(model_directory: Path, batch: Path, probes: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks()
    assert ranks.size == 2
    model = PackedModel(model_directory, ranks, lm_head_chunk=8)
    write_probe(ProbeStore(probes), Version(0, 1), read_batch(batch), model, tokens=64, seq_len=32)
    whole = [name for name, parameter in model.named_parameters().items() if not isinstance(parameter, DTensor)]
    assert not whole, f"left whole: {whole}"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    destroy_process_group()
