"""Translate a file with data, rewards and an objective (docs/how-to/hacking.md) into a run file.

The result is a tree of `RunConfig` with one environment, `hackable`. Sections of a run file are allowed beside those of
the short form; their values take precedence over derived ones. Problems name the key that the user wrote.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.config.base import ConfigError, Origins, Tree, as_table
from headrace.config.trainer import TrainerConfig
from headrace.errors import BadInput, InvalidValue
from headrace.runfile.hackable import plugins
from headrace.runfile.hackable.names import contradictions, rename_keys, trackers, translate_trainer, unknown_keys
from headrace.runfile.hackable.sections import (
    DataConfig,
    EvalDataConfig,
    GenerationConfig,
    HackableConfig,
    NamedTrainerConfig,
)
from headrace.runfile.hackable.storage import PathResolver, may_be_on_the_hub, tokens, variables
from headrace.runfile.reading import explain_all, located, merge, table_at

OWN_SECTIONS = ("objective", "rewards", "generation", "data", "storage", "auth")
ENVIRONMENT = "hackable"
PROMPT_TOKENS, NEW_TOKENS = 512, 512
GROUP_SIZE, GROUPS_PER_STEP = 8, 16


def is_hackable(tree: Tree) -> bool:
    """Return whether a tree is of the short form. SFT run files have `data`, too, but no provider."""
    data = tree.get("data")
    named = isinstance(data, dict) and bool(data.keys() & {"provider", "class_path"})
    return named or bool(tree.keys() & (set(OWN_SECTIONS) - {"data"}))


def translate(
    tree: Tree, run_sections: Sequence[str], files: Sequence[Path], origins: Origins
) -> tuple[Tree, list[str]]:
    """Return the tree of a `RunConfig`, and notices; `run_sections` are the sections of a run file."""
    try:
        written, notices = rename_keys(copy.deepcopy(tree))
    except InvalidValue as error:
        raise _refusal([error], origins) from error
    of_trainer = {*NamedTrainerConfig.model_fields, *TrainerConfig.model_fields}
    problems = unknown_keys(written, [*run_sections, *OWN_SECTIONS])
    problems += unknown_keys(table_at(written, "trainer"), of_trainer, "trainer.")
    own = {name: written[name] for name in (*OWN_SECTIONS, "trainer") if name in written}
    try:
        config = HackableConfig.model_validate(own)
    except ValidationError as error:
        more = explain_all(HackableConfig, error, {}, origins)
        raise ConfigError.combine([*(located(problem, origins) for problem in problems), *more]) from error
    if problems:
        raise _refusal(problems, origins)
    translation = _Translation(config, written, files)
    result = translation.result()
    if translation.problems:
        raise _refusal(translation.problems, origins)
    return result, notices + translation.notices


def _refusal(problems: Sequence[BadInput], origins: Origins) -> ConfigError:
    return ConfigError.combine([located(problem, origins) for problem in problems])


class _Translation:
    """The translation of one file: its validated sections, the problems and the notices."""

    def __init__(self, config: HackableConfig, tree: Tree, files: Sequence[Path]) -> None:
        self.config = config
        self.problems: list[BadInput] = []
        self.notices: list[str] = []
        self._file = files[-1].stem if files else "run"
        root = config.storage.cache_dir
        self._root = None if root is None else root.expanduser().absolute()
        self._paths = PathResolver([file.parent.absolute() for file in files], self._root)
        self._explicit = {key: value for key, value in tree.items() if key not in OWN_SECTIONS}
        """The sections of a run file that are set beside those of the short form."""
        self._explicit["trainer"] = {
            key: value
            for key, value in table_at(tree, "trainer").items()
            if key not in NamedTrainerConfig.model_fields or (key == "optim" and isinstance(value, dict))
        }
        model = table_at(self._explicit, "model")
        if isinstance(model.get("name"), str):
            model["name"] = self._paths.model(model["name"])
        if "lora" in model:
            self._explicit["trainer"].setdefault("lora", model.pop("lora"))
        self._needs_hub = isinstance(model.get("name"), str) and not Path(model["name"]).exists()

    def _refuse(self, fact: str, key: str, value: Any = None, fix: str | None = None) -> None:
        self.problems.append(BadInput(fact, key=key, value=value, fix=fix))

    def result(self) -> Tree:
        """Return the tree of the run; it is only valid if there are no problems."""
        group_size = self._number("orchestrator", "group_size") or self.config.generation.num_generations or GROUP_SIZE
        batch_size = self._batch_size(group_size)
        groups_per_step = None if batch_size is None else batch_size / group_size
        args = self._environment_args(groups_per_step)
        max_steps = self._max_steps(args, groups_per_step)
        written = translate_trainer(self.config.trainer, max_steps, self.problems, self.notices)
        self.problems += contradictions(written, self._explicit)
        tree = written.tree
        if latents := table_at(self._settings, "model").get("latents"):  # thoughts end with the closing tag of the data
            from headrace.environments.strict_format import format_with

            latents["until"] = format_with(self.config.data.kwargs.get("tags")).tags[1]
        merge(tree, self._settings)
        self._shared(tree, max_steps)
        merge(tree, {"orchestrator": self._orchestrator(args, group_size, batch_size)})
        self._trackers(tree)
        launch = {"env": self._variables(), "env_from": tokens(self.config.auth)}
        if launch := {name: table for name, table in launch.items() if table}:
            merge(tree, {"launch": launch})
        for slot in ("train", "eval"):  # environments of both forms stay in the list
            section = table_at(self._explicit, "orchestrator", slot)
            if isinstance(section.get("env"), list):
                section["env"] = [*table_at(tree, "orchestrator", slot).get("env", []), *section["env"]]
        merge(tree, self._explicit)
        return tree

    def _number(self, *path: str) -> int | None:
        """Return a whole number of a section of the run file; None for other values, which validation refuses later."""
        *parents, name = path
        value = table_at(self._explicit, *parents).get(name)
        return int(str(value)) if str(value).isdecimal() else None

    def _batch_size(self, group_size: int) -> int | None:
        """Return the completions per step; None where a step is counted in tokens."""
        trainer, section = self.config.trainer, table_at(self._explicit, "orchestrator")
        if section.keys() & {"batch_size", "token_batch_size"}:
            return self._number("orchestrator", "batch_size")
        size, key = trainer.batch_size, "trainer.batch_size"
        if trainer.per_device_train_batch_size is not None:
            ranks = self._number("launch", "trainer_processes") or 1
            product = trainer.per_device_train_batch_size * (trainer.gradient_accumulation_steps or 1) * ranks
            if size is not None and size != product:
                fact = f"trainer.per_device_train_batch_size times accumulation steps times processes is {product}"
                self._refuse(fact, "trainer.batch_size", size, "Give one of them, or the same size twice.")
            size, key = product, "trainer.per_device_train_batch_size"
        if size is not None and size % group_size:
            fact = f"a step of {size} completions is not whole groups of generation.num_generations = {group_size}"
            fix = f"Make the completions of a step a multiple of {group_size}."
            self._refuse(fact, key, getattr(trainer, key.removeprefix("trainer.")), fix)
        return size or GROUPS_PER_STEP * group_size

    def _environment_args(self, groups_per_step: float | None) -> dict[str, Any]:
        """Return the arguments of the environment that is trained on."""
        seed = self._explicit.get("seed", self.config.trainer.seed)
        seed = int(str(seed)) if str(seed).lstrip("-").isdecimal() else 0
        args: dict[str, Any] = {**self._data_args(), **self._objective_args(), "seed": seed}
        if self.config.rewards.timeout != 60.0:
            args["reward_timeout"] = self.config.rewards.timeout
        if groups_per_step is not None:
            args["groups_per_step"] = groups_per_step
        elif "stage2_start_epoch" in args["objective_kwargs"]:
            key, value = "objective.kwargs.stage2_start_epoch", args["objective_kwargs"]["stage2_start_epoch"]
            fix = "Set orchestrator.batch_size, or stage2_start_step instead."
            self._refuse("epochs are counted in steps of a known size", key, value, fix)
        return args

    def _data_args(self) -> dict[str, Any]:
        data = self.config.data
        if data.chosen is None:
            fix = "Set a data provider, or your own by data.class_path."
            self._refuse("required, and not set", "data.provider", fix=fix)
            return {}
        plugin = plugins.provider_named(data.chosen)
        kwargs = self._checked(plugin, data.kwargs, "data.class_path" if data.class_path else "data.provider")
        return {"provider": data.chosen, "provider_kwargs": kwargs}

    def _objective_args(self) -> dict[str, Any]:
        """Return the objective with the kwargs of its rewards, all checked."""
        section = self.config.objective
        plugin, before = plugins.objective_named(section.chosen), len(self.problems)
        kwargs = self._checked(
            plugin, section.kwargs, "objective.class_path" if section.class_path else "objective.name"
        )
        objective = None if len(self.problems) > before else plugins.construct_objective(plugin, kwargs, self.problems)
        self._algorithm = "grpo" if objective is None else objective.algorithm
        self._settings = {} if objective is None else copy.deepcopy(objective.settings)
        used = {} if objective is None else self._reward_kwargs(objective.reward_names())
        return {"objective": section.chosen, "objective_kwargs": kwargs, **({"reward_kwargs": used} if used else {})}

    def _reward_kwargs(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the kwargs of the objective's rewards; those of other rewards are checked and have no effect."""
        from headrace.environments.rewards.base import options_by_reward

        objective = self.config.objective.chosen
        try:
            rewards = options_by_reward(names, self.config.rewards.kwargs)
        except BadInput as error:
            self._refuse(error.fact, f"rewards.kwargs.{error.key}", fix=error.fix)
            return {}
        place = f"the rewards of objective {objective!r}"
        checked = {
            name: self._checked(plugins.reward_named(name), dict(rewards.get(name, {})), place) for name in names
        }
        for name in (name for name in rewards if name not in names):
            self._checked(plugins.reward_named(name), dict(rewards[name]), f"rewards.kwargs.{name}", needed=False)
            self.notices.append(f"rewards.kwargs.{name}: no effect, since objective {objective!r} does not use it.")
        return {name: own for name, own in checked.items() if own}

    def _checked(self, plugin: plugins.Plugin, kwargs: Tree, key: str, *, needed: bool = True) -> dict[str, Any]:
        """Check kwargs and resolve the paths among them."""
        from headrace.environments.hackable.providers import curriculum

        if not plugins.is_registered(plugin, key, self.problems):
            return {}
        checked = plugins.check_kwargs(plugin, kwargs, self.problems, needed=needed)
        values = {name: self._paths.resolve_kwarg(name, value) for name, value in checked.items()}
        if plugin.registry.find(plugin.name) is curriculum and "providers" in values:
            values["providers"] = self._parts(values["providers"], plugin.key)
        self._needs_hub |= needed and plugins.needs_hub(plugin, values, may_be_on_the_hub)
        return values

    def _parts(self, providers: Any, key: str) -> Any:
        """Return the providers of a curriculum with their kwargs checked."""
        from headrace.environments.hackable.providers import read_parts

        try:
            parts = read_parts(providers)
        except BadInput as error:
            self._refuse(error.fact, f"{key}.{error.key}", error.value, error.fix)
            return providers
        checked = []
        for number, (entry, part) in enumerate(zip(providers, parts, strict=True)):
            place = f"{key}.providers.{number}"
            kwargs = self._checked(
                plugins.provider_named(part.provider, f"{place}.kwargs"), part.kwargs, f"{place}.provider"
            )
            checked.append({**entry, "kwargs": kwargs})
        return checked

    def _max_steps(self, args: dict[str, Any], groups_per_step: float | None) -> int | None:
        trainer = self.config.trainer
        steps = None if trainer.max_steps in (None, -1, 0) else trainer.max_steps
        if (explicit := self._number("max_steps")) is not None:
            return explicit
        if steps is not None and trainer.num_train_epochs is not None:
            fact = f"trainer.num_train_epochs = {trainer.num_train_epochs:g} also sets the end of the run"
            self._refuse(fact, "trainer.max_steps", steps, "Give one of the two.")
        elif trainer.num_train_epochs is not None:
            samples = self._samples(args, groups_per_step, "trainer.num_train_epochs")
            return samples and math.ceil(trainer.num_train_epochs * samples / (groups_per_step or 1) - 1e-9)
        elif steps is None:
            self._refuse("required, and not set", "trainer.max_steps", fix="Set it, or trainer.num_train_epochs.")
        return steps

    def _samples(self, args: dict[str, Any], groups_per_step: float | None, key: str) -> int | None:
        """Return the samples per epoch."""
        if groups_per_step is None:
            self._refuse("epochs are counted in steps of a known size", key, fix="Set orchestrator.batch_size.")
        if self.problems:
            return None
        try:
            return plugins.count_samples(args["provider"], args["provider_kwargs"], args["seed"], self._variables())
        except BadInput as error:
            self._refuse(f"the samples cannot be counted: {error}", key, fix="Set trainer.max_steps instead.")
            return None

    def _variables(self) -> dict[str, str]:
        offline = self.config.storage.offline
        return variables(self._root, offline=not self._needs_hub if offline is None else offline)

    def _shared(self, tree: Tree, max_steps: int | None) -> None:
        storage, trainer = self.config.storage, self.config.trainer
        if trainer.run_name is not None and storage.run_name not in (None, trainer.run_name):
            fact, fix = f"storage.run_name is {storage.run_name}", "Give one of them, or the same name twice."
            self._refuse(fact, "trainer.run_name", trainer.run_name, fix)
        name = storage.run_name or trainer.run_name or self._file
        output = self._explicit.pop("output_dir", None) or trainer.output_dir
        if isinstance(output, str) and self._root is not None:
            output = self._paths.under_root(output)
        tree["output_dir"] = str(output or self._paths.run_directory(name))
        if max_steps is not None:
            tree["max_steps"] = max_steps
        if trainer.seed is not None:
            tree["seed"] = trainer.seed
        sampled = self.config.generation.max_new_tokens or NEW_TOKENS
        tree["seq_len"] = (self.config.generation.max_prompt_tokens or PROMPT_TOKENS) + sampled

    def _orchestrator(self, args: dict[str, Any], group_size: int, batch_size: int | None) -> Tree:
        generation, data = self.config.generation, self.config.data
        sampling = _sampling(generation)
        if generation.max_new_tokens is None and "seq_len" not in self._explicit:
            sampling["max_tokens"] = NEW_TOKENS
        section: Tree = {"group_size": group_size, "train": {"sampling": sampling, "env": [self._train_env(args)]}}
        if batch_size is not None:
            section["batch_size"] = batch_size
        if data.eval is not None and "provider" in args:
            section["eval"] = self._eval(data, data.eval, args, sampling)
        elif self.config.trainer.eval_steps is not None:
            self.notices.append("trainer.eval_steps: ignored, since nothing is evaluated; set data.eval.")
        return section

    def _train_env(self, args: dict[str, Any]) -> Tree:
        from headrace.environments.hackable.registry import DATA_PROVIDERS

        section = table_at(self._explicit, "orchestrator")
        env: Tree = {"id": ENVIRONMENT, "name": _last_part(args.get("provider", "")), "args": args}
        sampler = table_at(section, "train", "curriculum").get("sampler")
        if not self.problems and sampler is None and getattr(DATA_PROVIDERS.find(args["provider"]), "in_order", False):
            env["curriculum"] = {"sampler": {"type": "in_order"}}
        if self.config.data.ratio is not None:
            env["ratio"] = self.config.data.ratio
        if self._algorithm != "grpo" and not section.keys() & {"algo", "advantage"}:
            beta = self.config.trainer.beta
            env["algo"] = {**as_table(self._algorithm, "type"), **({} if beta is None else {"kl": {"coef": beta}})}
        return env

    def _eval(self, data: DataConfig, eval_data: EvalDataConfig, args: dict[str, Any], sampling: Tree) -> Tree:
        """Return the section of `data.eval`, with values of training where it has none."""
        chosen = eval_data.class_path or eval_data.provider or args["provider"]
        inherited = data.kwargs if chosen == data.chosen else {}
        key = "data.eval.class_path" if eval_data.class_path else "data.eval.provider"
        kwargs = self._checked(
            plugins.provider_named(chosen, "data.eval.kwargs"), {**inherited, **eval_data.kwargs}, key
        )
        trained_on = {"provider": args["provider"], "kwargs": args["provider_kwargs"]}
        own = {**args, "provider": chosen, "provider_kwargs": kwargs, "trained_on": trained_on}
        env: Tree = {"id": ENVIRONMENT, "name": _last_part(chosen), "args": own}
        section: Tree = {"env": [env], "sampling": {**sampling, **_sampling(eval_data)}}
        steps = self.config.trainer.eval_steps
        if eval_data.interval is not None and steps not in (None, eval_data.interval):
            fact = f"data.eval.interval is {eval_data.interval}"
            self._refuse(fact, "trainer.eval_steps", steps, "Give one of the two.")
        sizes = {"num_examples": eval_data.num_examples, "group_size": eval_data.num_generations}
        values = {"interval": eval_data.interval or steps, **sizes}
        return section | {name: value for name, value in values.items() if value is not None}

    def _trackers(self, tree: Tree) -> None:
        tree |= trackers(self.config.trainer, self.problems)
        explicit = self._explicit.get("wandb")
        if "wandb" not in tree and not isinstance(explicit, dict):
            return
        made = {} if self._root is None else {"dir": str(self._root / "logs")}
        if self.config.storage.offline:  # storage.offline also applies to W&B and overrides its section
            made["mode"] = "offline"
            if isinstance(explicit, dict) and explicit.get("mode") == "online":
                del explicit["mode"]
                notice = "wandb.mode = online: storage.offline overrides it; export WANDB_MODE=online instead."
                self.notices.append(notice)
        merge(tree, {"wandb": made})


def _sampling(section: GenerationConfig | EvalDataConfig) -> Tree:
    values: Tree = {name: getattr(section, name) for name in ("temperature", "top_p", "min_p")}
    values |= {"max_tokens": section.max_new_tokens, "top_k": -1 if section.top_k == 0 else section.top_k}
    return {name: value for name, value in values.items() if value is not None}


def _last_part(name: str) -> str:
    return name.rpartition(":")[2]
