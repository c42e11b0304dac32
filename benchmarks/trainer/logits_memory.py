"""Peak memory and CPU time of logprobs, entropies and their gradient on a CPU, by the tokens of a chunk of logits.

    .venv/bin/python benchmarks/trainer/logits_memory.py [--tokens 4096] [--vocabulary 151936] [--chunks 4096 256]

Each chunk size is measured in a process of its own; the memory is what the peak exceeds the imports by.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

HIDDEN_SIZE = 16


def measure(tokens: int, vocabulary: int, chunk: int) -> None:
    import torch

    from headrace.trainer.lm_head import label_logprobs

    imports = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hidden = torch.randn(tokens, HIDDEN_SIZE, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocabulary, HIDDEN_SIZE))
    labels = torch.randint(vocabulary, (tokens,))
    started = time.process_time()
    logprobs, _ = label_logprobs(hidden, weight, labels, torch.ones(tokens), chunk)
    logprobs.sum().backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imports
    print(f"{chunk:>8}{peak / 1024:>10.0f}{time.process_time() - started:>9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4096, 1024, 256])
    arguments = parser.parse_args()
    if len(arguments.chunks) == 1:
        measure(arguments.tokens, arguments.vocabulary, arguments.chunks[0])
        return
    print(f"all logits: {4 * arguments.tokens * arguments.vocabulary / 2**20:,.0f} MiB")
    print(f"{'chunk':>8}{'peak MiB':>10}{'CPU s':>9}", flush=True)
    for chunk in arguments.chunks:
        sizes = ["--tokens", str(arguments.tokens), "--vocabulary", str(arguments.vocabulary)]
        subprocess.run([sys.executable, __file__, *sizes, "--chunks", str(chunk)], check=True)


if __name__ == "__main__":
    main()
