"""Settings of TRL's GRPOTrainer as a hackable run file: from GRPOConfig's fields in JSON or YAML, or from a script.

Of a script, what is written as literals is read: `GRPOConfig(...)`, the model, the data and the reward functions of
`GRPOTrainer(...)`. The script is not executed. Its reward functions are copied, with the imports, constants and helpers
that they use.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from headrace.config.base import Tree

SCRIPT_FIELDS = ("model_name_or_path", "dataset_name", "dataset_config", "dataset_train_split", "reward_funcs")
"""Fields of TRL's own command line, beside those of GRPOConfig."""
FIELDS = {"num_generations", "max_completion_length", "per_device_train_batch_size", "learning_rate", *SCRIPT_FIELDS}
"""Names by which a file is recognized: no run file has them at its top."""
HINTS = {
    "generation_batch_size": "trainer.batch_size counts the completions of a step.",
    "loss_type": "trainer.loss chooses; see docs/reference/algorithms.md.",
    "mask_truncated_completions": "Use a filter: orchestrator.pre_batch_filters.",
    "num_iterations": "Each batch is trained once.",
    "scale_rewards": "[orchestrator.algo] of grpo has the normalization.",
    "steps_per_generation": "Sampling overlaps with training; orchestrator.max_async_level bounds it.",
    "vllm_gpu_memory_utilization": "inference.vllm.gpu_memory_utilization is the same.",
    "vllm_mode": "The launcher places the engine; launch.sharing chooses between turns and overlap.",
}


class Script(NamedTuple):
    settings: dict[str, Any]
    """Fields of GRPOConfig and of TRL's command line."""
    rewards: str
    """A module with the reward functions; empty if there are none."""
    unread: list[str]
    """Fields that are not literals."""


def read_script(source: str) -> Script:
    """Read the settings of a training script without executing it."""
    module = ast.parse(source)
    settings: dict[str, Any] = {}
    unread: list[str] = []
    functions: list[str] = []
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        fields = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if name == "GRPOConfig":
            for field, value in fields.items():
                literal = _literal(value)
                settings.update({field: literal[0]} if literal else {})
                unread += [] if literal else [field]
        elif name == "GRPOTrainer":
            if "model" in fields and (literal := _literal(fields["model"])):
                settings["model_name_or_path"] = literal[0]
            given = fields.get("reward_funcs")
            items = given.elts if isinstance(given, ast.List | ast.Tuple) else [] if given is None else [given]
            functions = [item.id for item in items if isinstance(item, ast.Name)]
            unread += ["reward_funcs"] if len(functions) != len(items) else []
        elif name == "load_dataset":
            names = [literal[0] for argument in call.args if (literal := _literal(argument))]
            settings.update(dict(zip(("dataset_name", "dataset_config"), names, strict=False)))
            if "data_files" in fields and (literal := _literal(fields["data_files"])):
                settings["dataset_name"] = literal[0]
            if "split" in fields and (literal := _literal(fields["split"])):
                settings["dataset_train_split"] = literal[0]
    settings["reward_funcs"] = functions
    return Script(settings, _reward_module(module, functions), unread)


def translate(settings: dict[str, Any], rewards_file: str) -> Tree:
    """Return a hackable run file of these settings; unknown ones are in its `trainer` section, to be refused there."""
    own = {name: settings.pop(name) for name in SCRIPT_FIELDS if name in settings}
    tree: Tree = {}
    if "model_name_or_path" in own:
        tree["model"] = {"name": own["model_name_or_path"]}
    if isinstance(path := own.get("dataset_name"), str) and path.endswith((".jsonl", ".json", ".parquet")):
        tree["data"] = {"provider": "local", "kwargs": {"path": path, "instructions": ""}}
    elif "dataset_name" in own:
        data = {
            "name": own["dataset_name"],
            "subset": own.get("dataset_config"),
            "split": own.get("dataset_train_split"),
        }
        kwargs = {key: value for key, value in data.items() if value is not None}
        tree["data"] = {"provider": "huggingface", "kwargs": {**kwargs, "instructions": ""}}
    functions = own.get("reward_funcs") or []
    functions = [functions] if isinstance(functions, str) else functions
    if functions:
        names = [name if ":" in name or not rewards_file else f"{rewards_file}:{name}" for name in functions]
        weights = settings.pop("reward_weights", None)
        kwargs = {"rewards": names, **({} if weights is None else {"weights": weights})}
        tree["objective"] = {"name": "reward_sum", "kwargs": kwargs}
    tree["trainer"] = settings
    return tree


def _literal(node: ast.expr) -> tuple[Any] | None:
    """Return a value in a tuple, or None if it is not a literal."""
    try:
        return (ast.literal_eval(node),)
    except ValueError:
        return None


def _reward_module(module: ast.Module, functions: list[str]) -> str:
    """Return the source of these functions and of everything at the top of the script that they use."""
    definitions = {name: statement for statement in module.body for name in _defined(statement)}
    wanted, chosen = list(functions), set[int]()
    while wanted:
        statement = definitions.get(wanted.pop())
        if statement is not None and statement.lineno not in chosen:
            chosen.add(statement.lineno)
            wanted += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    parts = [ast.unparse(statement) for statement in module.body if statement.lineno in chosen]
    return "\n\n\n".join(parts) + "\n" if parts else ""


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []
