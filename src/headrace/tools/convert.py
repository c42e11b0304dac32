"""Translate run files of other systems: prime-rl's TOML, and TRL's GRPOConfig as JSON, YAML or a training script.

Keys that a run file of Headrace does not have are left out one by one, each with the reason. Of a script, what is
written as literals is read: `GRPOConfig(...)`, the model, the data and the reward functions of `GRPOTrainer(...)`. The
script is not executed. Its reward functions are copied, with the imports, constants and helpers that they use.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import tomli_w
import yaml  # type: ignore[import-untyped]

from headrace.config.base import Origins, Tree
from headrace.config.files import read_file
from headrace.environments.registry import SHIPPED
from headrace.errors import BadInput
from headrace.launch.own_code import defined_names
from headrace.runfile.foreign_keys import remove_key, replace_foreign_keys
from headrace.runfile.reading import put, validate, value_at
from headrace.runfile.run import RunConfig

SYSTEMS = ("prime-rl", "trl")


class LeftOut(NamedTuple):
    key: str
    value: Any
    reason: str


@dataclass
class Conversion:
    """A run file of Headrace, and what became of the keys of the other one."""

    system: str
    tree: Tree
    rewards: str = ""
    """The source of a module with reward functions, which belongs beside the run file."""
    renamed: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    missing: list[BadInput] = field(default_factory=list)
    """What must be added before the run can start."""

    @property
    def suffix(self) -> str:
        return ".toml" if self.system == "prime-rl" else ".yaml"

    def text(self) -> str:
        if self.system == "prime-rl":
            return tomli_w.dumps(self.tree)
        text: str = yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)
        return text


def convert(file: Path, system: str | None = None, rewards_file: str = "rewards.py") -> Conversion:
    """Translate a prime-rl TOML file, or TRL's settings in a JSON or YAML file or in a script.

    The reward functions of a script are to be written to `rewards_file`.
    """
    if file.suffix == ".py":
        script = read_script(file.read_text(encoding="utf-8"))
        if not script.settings.get("reward_funcs") and len(script.settings) == 1:
            raise BadInput("no GRPOConfig with literal settings is in it", file=file)
        made = Conversion("trl", translate_trl(script.settings, rewards_file), script.rewards)
        made.left_out = [LeftOut(name, None, "It is not a literal in the script.") for name in script.unread]
    else:
        content = read_file(file)
        recognized = system or _recognize(content, file)
        if recognized == "trl":
            made = Conversion(recognized, translate_trl(content, ""))
        else:
            made = Conversion(recognized, content, notices=replace_foreign_keys(content))
            made.renamed, left = translate_prime_rl(content)
            made.left_out = [LeftOut(*each) for each in left]
    with TemporaryDirectory() as folder:  # where the reward functions can be imported from
        Path(folder, rewards_file).write_text(made.rewards, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            _leave_out_unknown(made, file)
        finally:
            sys.path.remove(folder)
    return made


def _recognize(content: Tree, file: Path) -> str:
    if content.keys() & TRL_FIELDS:
        return "trl"
    if content.keys() & {"orchestrator", "trainer", "inference"}:
        return "prime-rl"
    fix = f"Name its system: --from {' or '.join(SYSTEMS)}."
    raise BadInput("neither a run file of prime-rl nor settings of TRL", file=file, fix=fix)


def _leave_out_unknown(made: Conversion, file: Path) -> None:
    """Validate until what remains is valid, or lacks something that only the user knows."""
    while problems := _problems(made.tree, file):
        present = [each for each in problems if each.key and value_at(made.tree, each.key.split(".")) is not None]
        made.missing = [problem for problem in problems if problem not in present]
        if not present:
            return
        for problem in present:
            assert problem.key is not None
            *parents, name = problem.key.split(".")
            value = value_at(made.tree, parents).pop(name, None)
            hint = TRL_HINTS.get(problem.key.rpartition(".")[2]) if made.system == "trl" else None
            reason = hint or " ".join(filter(None, [f"{problem.fact.rstrip('.')}.", problem.fix]))
            made.left_out.append(LeftOut(problem.key, value, reason))


def _problems(tree: Tree, file: Path) -> Sequence[BadInput]:
    origins = Origins(str(file))
    try:
        translated, _ = RunConfig.translated(copy.deepcopy(tree), [file], origins)
        validate(RunConfig, translated, origins)
    except BadInput as error:
        return error.problems
    return ()


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


def translate_prime_rl(tree: Tree) -> tuple[list[tuple[str, str]], list[tuple[str, Any, str]]]:
    """Change a tree in place; return the keys that were renamed, old and new, and those left out, with the reason."""
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
    identifier = taskset.get("id") if isinstance(taskset, dict) else env.get("id")
    if not isinstance(identifier, str):
        return []
    name = identifier.removeprefix("verifiers:").rpartition("/")[2].partition("@")[0]
    env["id"] = name if name in SHIPPED else f"verifiers:{name}"
    if isinstance(taskset, dict) and (options := {key: value for key, value in taskset.items() if key != "id"}):
        env["args"] = {**options, **env.get("args", {})}
    theirs = "taskset.id" if taskset else "id"
    return [] if (theirs, identifier) == ("id", env["id"]) else [(f"{place}.{theirs}", f"{place}.id = {env['id']}")]


SCRIPT_FIELDS = ("model_name_or_path", "dataset_name", "dataset_config", "dataset_train_split", "reward_funcs")
"""Fields of TRL's own command line, beside those of GRPOConfig."""
TRL_FIELDS = {*SCRIPT_FIELDS, "num_generations", "max_completion_length", "per_device_train_batch_size"}
"""Names by which a file is recognized: no run file has them at its top."""
TRL_HINTS = {
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
            rewards = fields.get("reward_funcs")
            items = rewards.elts if isinstance(rewards, ast.List | ast.Tuple) else [] if rewards is None else [rewards]
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


def translate_trl(settings: dict[str, Any], rewards_file: str) -> Tree:
    """Return a hackable run file of these settings; unknown ones are in its `trainer` section, to be refused there."""
    own = {name: settings.pop(name) for name in SCRIPT_FIELDS if name in settings}
    tree: Tree = {}
    if "model_name_or_path" in own:
        tree["model"] = {"name": own["model_name_or_path"]}
    if isinstance(path := own.get("dataset_name"), str) and path.endswith((".jsonl", ".json", ".parquet")):
        tree["data"] = {"provider": "local", "kwargs": {"path": path, "instructions": ""}}
    elif "dataset_name" in own:
        data = {"name": path, "subset": own.get("dataset_config"), "split": own.get("dataset_train_split")}
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
    definitions = {name: statement for statement in module.body for name, _ in defined_names(statement)}
    wanted, chosen = list(functions), set[int]()
    while wanted:
        statement = definitions.get(wanted.pop())
        if statement is not None and statement.lineno not in chosen:
            chosen.add(statement.lineno)
            wanted += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    parts = [ast.unparse(statement) for statement in module.body if statement.lineno in chosen]
    return "\n\n\n".join(parts) + "\n" if parts else ""
