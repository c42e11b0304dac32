"""Keys that users of other systems write from habit, and what they are called or replaced by here."""

from __future__ import annotations

from typing import Any

_EVAL_OVERLAPS = (
    "evaluation shares permits with training and nothing is cancelled for it; orchestrator.max_inflight_rollouts "
    "bounds both"
)

HABITS: dict[str, str] = {
    "orchestrator.buffer": (
        "there is no buffer to tune: orchestrator.pre_batch_filters decides what enters a batch, and the source "
        "refills what they reject"
    ),
    "orchestrator.eval.cancel_inflight_rollouts_on_eval": _EVAL_OVERLAPS,
    "eval.cancel_inflight_rollouts_on_eval": _EVAL_OVERLAPS,
}
"""Keys without a counterpart: one notice says what makes them unnecessary, and they are ignored."""


OTHER_NAMES: dict[str, str] = {
    "learning_rate": "lr",
    "rollouts_per_example": "group_size",
    "num_generations": "group_size",
    "max_concurrent": "max_inflight_rollouts",
    "max_seq_len": "seq_len",
    "max_new_tokens": "max_tokens",
    "model_name": "name",
    "algorithm": "algo",
    "coefficient": "coef",
    "length_weighted_mean": "length_weighted_baseline",
}
"""What a key is called elsewhere: an unknown key of this name suggests ours."""


def fold_habits(tree: dict[str, Any]) -> list[str]:
    """Remove the known foreign keys from `tree`; returns one notice for each."""
    notices = []
    for path, advice in HABITS.items():
        if _remove(tree, path.split(".")):
            notices.append(f"{path} is not a key of Headrace and is ignored: {advice}.")
    return notices


def _remove(tree: dict[str, Any], path: list[str]) -> bool:
    """Delete a key, and the section around it if that leaves it empty."""
    if len(path) == 1:
        return tree.pop(path[0], None) is not None
    node = tree.get(path[0])
    if not isinstance(node, dict) or not _remove(node, path[1:]):
        return False
    if not node:
        del tree[path[0]]
    return True
