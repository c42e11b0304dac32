"""Keys that users of other systems write from habit, and what they are called or replaced by here."""

from __future__ import annotations

from typing import Any

from headrace.config.base import as_table, merge_names

_EVAL_OVERLAPS = (
    "evaluation shares permits with training and nothing is cancelled for it; orchestrator.max_inflight_rollouts "
    "bounds both"
)

IGNORED_KEYS: dict[str, str] = {
    "orchestrator.buffer": (
        "there is no buffer to tune: orchestrator.pre_batch_filters decides what enters a batch, and the source "
        "refills what they reject"
    ),
    "orchestrator.eval.cancel_inflight_rollouts_on_eval": _EVAL_OVERLAPS,
    "eval.cancel_inflight_rollouts_on_eval": _EVAL_OVERLAPS,
}
"""Keys without a counterpart: one notice says what makes them unnecessary, and they are ignored."""


MOVED: dict[str, str] = {
    "experimental.log_loop_interval": "orchestrator.log_loop_interval",
    "orchestrator.experimental.log_loop_interval": "orchestrator.log_loop_interval",
    "orchestrator.concurrency.initial_inflight": "orchestrator.max_inflight_rollouts",
    "orchestrator.env": "orchestrator.train.env",
    "orchestrator.max_concurrent": "orchestrator.max_inflight_rollouts",
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.sampling": "orchestrator.train.sampling",
    "orchestrator.train.sampling.max_completion_tokens": "orchestrator.train.sampling.max_tokens",
    "orchestrator.eval.sampling.max_completion_tokens": "orchestrator.eval.sampling.max_tokens",
    "orchestrator.policy.client": "orchestrator.client",
    "orchestrator.policy.renderer": "orchestrator.renderer",
    "orchestrator.policy.model": "model",
    "orchestrator.policy": "model",
    "orchestrator.student.client": "orchestrator.client",
    "orchestrator.student.renderer": "orchestrator.renderer",
    "orchestrator.student.model": "model",
    "orchestrator.student": "model",
}
"""Keys that stand elsewhere here: they are read as if they stood there, and one notice says where."""

HINTS: dict[str, str] = {
    "attn_implementation": (
        "Set trainer.attention (in an SFT file: attention) to auto, cudnn, flash or sdpa; auto takes the fastest."
    ),
    "use_liger_kernel": (
        "Leave it out: logits are computed in chunks (trainer.lm_head_chunk) and layers are compiled (trainer.compile)."
    ),
    "deepspeed": (
        "Leave it out: launch.trainer_processes ranks shard the model with FSDP; trainer.optim.offload_state and "
        "trainer.activation_offload use CPU memory."
    ),
}
"""Settings of other trainers that have no counterpart of the same form: an unknown key of this name gets the advice."""

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


def replace_foreign_keys(tree: dict[str, Any]) -> list[str]:
    """Remove or move the known foreign keys in `tree`; returns one notice for each."""
    notices = []
    for path, advice in IGNORED_KEYS.items():
        if remove_key(tree, path.split(".")) is not None:
            notices.append(f"{path} is not a key of Headrace and is ignored: {advice}.")
    for path, ours in MOVED.items():
        if (value := remove_key(tree, path.split("."))) is not None:
            value = as_table(value, "name") if ours == "model" else value
            *parents, name = ours.split(".")
            section = tree
            for parent in parents:
                section = section.setdefault(parent, {})
            section[name] = merge_names(section.get(name, value), value, ours, path)  # refuses a contradiction
            notices.append(f"{path} is read as {ours}.")
    return notices


def remove_key(tree: dict[str, Any], path: list[str]) -> Any:
    """Delete a key, and the section around it if that leaves it empty; return its value, or None."""
    if len(path) == 1:
        return tree.pop(path[0], None)
    node = tree.get(path[0])
    value = remove_key(node, path[1:]) if isinstance(node, dict) else None
    if value is not None and not node:
        del tree[path[0]]
    return value
