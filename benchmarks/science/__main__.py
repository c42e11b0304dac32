"""Effects from papers, in miniature: run one experiment and print its tables with the verdict on each claim.

    python -m benchmarks.science max_rl
    python -m benchmarks.science max_rl --seeds 101 102 --output outputs/science-tuning

The result goes to docs/explanation/science.md with seeds 1 to 5, which no setting was chosen with. A run that is in
`--output` is not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.science.frame import named, report, run_all

NAMES = ("distillation", "staleness", "max_rl", "rlcsd", "lambda_sweep", "length_penalty", "latent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", help="those of the reported result by default")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each with one core")
    parser.add_argument("--output", type=Path, default=Path("outputs/science"))
    options = parser.parse_args()
    experiment = named(options.name)
    runs = run_all(options.name, options.output / options.name, options.seeds or experiment.seeds, options.jobs)
    report(experiment, runs, options.output, options.name)


if __name__ == "__main__":
    main()
