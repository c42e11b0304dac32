"""A run file of prime-rl: most keys are the same here, some stand elsewhere, and environments have other ids."""

from __future__ import annotations

from typing import Any

from headrace.config.base import Tree
from headrace.environments.registry import SHIPPED
from headrace.runfile.foreign_keys import remove_key
from headrace.runfile.reading import put, value_at

RENAMED = {
    "ckpt": "trainer.ckpt",
    "deployment.gpus_per_node": "launch.gpus_per_node",
    "deployment.num_infer_gpus": "launch.inference_servers",
    "deployment.num_infer_nodes": "launch.inference_nodes",
    "deployment.num_train_gpus": "launch.trainer_processes",
    "deployment.num_train_nodes": "launch.trainer_nodes",
    "inference.gpu_memory_utilization": "inference.vllm.gpu_memory_utilization",
    "inference.model.max_model_len": "inference.max_model_len",
    "inference.parallel.dp": "inference.vllm.data_parallel_size",
    "inference.parallel.tp": "inference.vllm.tensor_parallel_size",
    "inference.server.host": "inference.host",
    "inference.server.port": "inference.port",
    "max_async_level": "orchestrator.max_async_level",
    "orchestrator.ckpt": "trainer.ckpt",
    "slurm.account": "launch.slurm.account",
    "slurm.partition": "launch.slurm.partition",
    "slurm.time": "launch.slurm.time",
    "trainer.model.lora.alpha": "trainer.lora.alpha",
    "trainer.model.lora.rank": "trainer.lora.r",
    "trainer.model.lora.target_modules": "trainer.lora.target_modules",
    "trainer.model.seq_len": "seq_len",
}
"""Keys that stand elsewhere here. `runfile.foreign_keys` has those that are accepted in place."""
NEEDLESS = {
    "deployment.type": "launch.on and launch.*_nodes say where a run's processes are.",
    "log": "Every process has its log in logs/; HEADRACE_LOG_LEVEL sets the level.",
    "trainer.model.ac": 'trainer.activation_checkpointing = "auto" recomputes as much as memory requires.',
    "trainer.model.ac_offloading": "trainer.activation_offload = true does the same.",
    "trainer.model.attn": 'trainer.attention = "auto" takes the fastest.',
    "trainer.model.compile": 'trainer.compile = "auto" compiles on a GPU.',
    "trainer.model.impl": "One implementation trains every family; see headrace models.",
    "weight_broadcast": "trainer.weights.transport chooses: shared memory on one host, a link between hosts, or files.",
}
"""Keys without a counterpart, each with what makes it unnecessary."""


def translate(tree: Tree) -> tuple[list[tuple[str, str]], list[tuple[str, Any, str]]]:
    """Change a tree in place. Returns keys that were renamed, old and new, and those left out with value and reason."""
    renamed, left = [], []
    if isinstance(tree.get("slurm"), dict):
        put(tree, ["launch", "on"], "slurm")
        renamed.append(("slurm", "launch.on"))
    if isinstance(tree.get("inference"), dict):
        tree["inference"].setdefault("engine", "vllm")
        renamed.append(("inference", 'inference.engine = "vllm"'))
    for theirs, ours in RENAMED.items():
        if (value := remove_key(tree, theirs.split("."))) is not None:
            put(tree, ours.split("."), value)
            renamed.append((theirs, ours))
    for key, reason in NEEDLESS.items():
        if (value := remove_key(tree, key.split("."))) is not None:
            left.append((key, value, reason))
    for part in ("train", "eval"):
        for number, env in enumerate(value_at(tree, ["orchestrator", part, "env"]) or []):
            renamed += _translate_environment(env, f"orchestrator.{part}.env.{number}", left)
    tree.setdefault("output_dir", "outputs")  # their default
    for section in ("deployment", "slurm", "log"):
        if tree.get(section) == {}:
            del tree[section]
    return renamed, left


def _translate_environment(env: Tree, place: str, left: list[tuple[str, Any, str]]) -> list[tuple[str, str]]:
    """Give an environment of the verifiers library its id here; its harness is left out."""
    taskset, harness = env.pop("taskset", None), env.pop("harness", None)
    if harness is not None:
        left.append((f"{place}.harness", harness, "A taskset brings its own; docs/how-to/verifiers.md names others."))
    given = taskset.get("id") if isinstance(taskset, dict) else env.get("id")
    if not isinstance(given, str):
        return []
    name = given.removeprefix("verifiers:").rpartition("/")[2].partition("@")[0]
    env["id"] = name if name in SHIPPED else f"verifiers:{name}"
    if isinstance(taskset, dict) and (options := {key: value for key, value in taskset.items() if key != "id"}):
        env["args"] = {**options, **env.get("args", {})}
    theirs = "taskset.id" if taskset else "id"
    return [] if (theirs, given) == ("id", env["id"]) else [(f"{place}.{theirs}", f"{place}.id = {env['id']}")]
