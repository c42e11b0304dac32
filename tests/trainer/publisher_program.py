"""What each rank of a test runs: publishes a model over the link and as files, then waits for a file that ends it."""

import sys
import time
from pathlib import Path

import torch

from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.trainer.publisher import Publisher
from headrace.trainer.ranks import Ranks
from headrace.transport.weights import WeightStore


def main(model: Path, weights: Path, over: Path) -> None:
    torch.set_num_threads(1)
    publisher = Publisher(WeightStore(weights), PackedModel(model, Ranks(), dtype=torch.bfloat16), host="127.0.0.1")
    publisher.publish(Version(0, 1))
    publisher.publish(Version(0, 2), lasting=True)
    while not over.exists():
        time.sleep(0.05)
    publisher.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
