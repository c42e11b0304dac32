"""What a run needs of this machine, planned before it starts: GPU memory, host memory and disk.

Pure: computed from the run file, the shape of the model, and the sizes of the machine. Tensors are exact; activations,
working memory and processes are estimates. A run is refused only if its tensors alone do not fit. Left out on purpose:
engines elsewhere, environments with processes of their own, and the memory that other programs use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

from headrace.config.sft import OfflineConfig
from headrace.config.trainer import TrainingConfig
from headrace.errors import BadInput
from headrace.inference.embedded.block_manager import BLOCK_SIZE
from headrace.inference.memory import (
    CONTEXT_BYTES,
    CPU_CACHE_SHARE,
    ColocatedEngines,
    ColocatedTrainer,
    blocks_within,
    cache_budget,
    choose_max_running,
    keeps_base_in_memory,
    working_bytes,
)
from headrace.inference.model_shape import EXPERTS, ModelShape
from headrace.launch.placement import Placement, Sharing
from headrace.orchestrator.concurrency import INITIAL_QUEUE
from headrace.runfile.run import AnyRun, RunConfig
from headrace.trainer.host_copies import PUBLISHED_COPIES, checkpoint_bytes, save_bytes
from headrace.trainer.memory_plan import USED_SHARE_OF_FREE, ModelSizes, make_memory_plan

GIB = 1 << 30
GPU_PROCESS_BYTES, CPU_PROCESS_BYTES = 3 * GIB, GIB // 2
"""Approximate host memory of a process with torch: libraries, CUDA's context, buffers."""


@dataclass(frozen=True)
class Machine:
    """The sizes of a machine, in bytes."""

    gpu_memory: int | None
    """Memory of the smallest visible GPU; None without GPUs, or if it is unknown."""
    host_memory: int
    """Memory that all processes of the run may use together."""
    swap: int = 0
    free_host_memory: int | None = None
    """What other programs leave of it now."""
    free_disk: int | None = None
    """Free space of the run directory's disk, and what the run occupies there already."""
    disk_is_memory: bool = False
    """Whether that disk is a memory file system, such as /dev/shm."""


class Part(NamedTuple):
    """One use of a resource."""

    name: str
    size: int
    is_certain: bool = True
    """Whether the size is that of tensors that will exist, not an estimate."""


@dataclass(frozen=True)
class Budget:
    """The uses of a resource at the moment when they are largest, against what exists."""

    resource: str
    available: int
    parts: tuple[Part, ...]
    reserve: int = 0
    """What is available beyond, if slowly: swap."""
    note: str = ""

    @property
    def needed(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def certain(self) -> int:
        return sum(part.size for part in self.parts if part.is_certain)

    @property
    def cannot_fit(self) -> bool:
        return self.certain > self.available + self.reserve

    def __str__(self) -> str:
        shown = [part for part in self.parts if part.size >= 0.05 * GIB or part.size >= 0.1 * self.needed]
        parts = ", ".join(f"{part.name} {gib(part.size)}" for part in shown)
        verdict = "" if self.needed <= self.available else " (may not fit)"
        verdict = " (cannot fit)" if self.cannot_fit else verdict
        return f"{self.resource}: {gib(self.needed)} of {gib(self.available)} GiB{verdict}: {parts}{self.note}"


@dataclass(frozen=True)
class ResourcePlan:
    """The budgets of a run, and what follows from them."""

    budgets: tuple[Budget, ...]
    max_running: int | None = None
    """Requests that each server decodes together; None: left to the server."""
    problems: tuple[BadInput, ...] = ()
    """Refusals of the engine that are certain."""

    @property
    def fits(self) -> bool:
        """Whether it fits with all estimates."""
        return not self.problems and all(budget.needed <= budget.available for budget in self.budgets)


def gib(size: int) -> str:
    """Return a size in GiB; in more digits if it would be 0.0."""
    return f"{size / GIB:.{1 if size >= 0.05 * GIB else 3}f}"


def trainer_of(config: AnyRun) -> TrainingConfig:
    return config.trainer if isinstance(config, RunConfig) else config


class ResourcePlanner:
    """Plans one run, from figures that its budgets share. `placement` without servers: the run starts none."""

    def __init__(
        self, config: AnyRun, shape: ModelShape, machine: Machine, placement: Placement, sharing: Sharing | None
    ) -> None:
        self.config, self.shape, self.machine, self.placement, self.sharing = config, shape, machine, placement, sharing
        self.trainer = trainer = trainer_of(config)
        self.on_gpu = placement.trains_on_gpus
        self.ranks, self.servers = placement.ranks, len(placement.servers)
        self.parameters = shape.parameters
        lora = trainer.lora
        self.trained = self.parameters if lora is None else shape.adapter_parameters(lora.r, lora.target_modules)
        narrow = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and self.on_gpu)
        self.compute_bytes = 2 if narrow else 4
        self.longest = config.inference.max_model_len or config.seq_len or 1
        transport = config.trainer.weights.transport if isinstance(config, RunConfig) and lora is None else "files"
        self.links = transport == "link" or (transport == "auto" and self.on_gpu and placement.shares_gpu)
        """Whether engines get new weights from the trainer's memory."""

    def plan(self) -> ResourcePlan:
        budgets: list[Budget] = []
        problems: list[BadInput] = []
        max_running = self.config.inference.max_running
        if self.on_gpu and self.machine.gpu_memory is not None:
            total = self.machine.gpu_memory
            budgets.append(self._training_step(total))
            if self.servers:
                try:
                    memory = self._cache_memory(total)
                    if max_running is None:
                        max_running = choose_max_running(self.shape, memory, self.longest, self._in_flight())
                    budgets.append(self._sampling(total, memory, max_running))
                except BadInput as error:
                    problems.append(error)
        budgets.append(self._host())
        if self.machine.free_disk is not None:
            budgets.append(self._disk(self.machine.free_disk))
        return ResourcePlan(tuple(budgets), max_running, tuple(problems))

    def _in_flight(self) -> int:
        """Return the requests that each server may get at once.

        With `auto`, more than `max_async_level` batches in flight would only be sampled to be stale.
        """
        if isinstance(self.config, OfflineConfig):
            return 0  # evaluation beside the training
        orchestrator = self.config.orchestrator
        configured = orchestrator.max_inflight_rollouts
        sampling = self.servers - (orchestrator.past_policy is not None)
        if configured != "auto":
            return configured // sampling
        batch = orchestrator.batch_size or 0
        running = int((1 + orchestrator.max_async_level) * batch / (1 + INITIAL_QUEUE)) // sampling
        return 1 << max(0, running.bit_length() - 1)

    # GPU

    def _trainer_parts(self) -> list[Part]:
        """Return the tensors that each rank keeps between steps."""
        base = 0 if self.trainer.lora is None else self.parameters * (self.compute_bytes if self.ranks == 1 else 4)
        state = 0 if self.trainer.optim.offload_state and self.on_gpu else self.trainer.optim.state_bytes
        return [
            Part("parameters", (base + 4 * self.trained) // self.ranks),
            Part("optimizer", state * self.trained // self.ranks),
            *([Part("reference", 4 * self.trained // self.ranks)] if self.trainer.keeps_reference else []),
        ]

    def _published_copy(self) -> Part:
        shares = self.links and self.placement.shares_gpu
        return Part("published copy", self.compute_bytes * self.parameters if shares else 0)

    def _engines(self) -> ColocatedEngines:
        """Return the engines on the trainer's GPU."""
        inference = self.config.inference
        return ColocatedEngines(
            alternates=self.sharing == "alternate",
            trainer_bytes_per_parameter=self._bytes_per_parameter(while_training=True),
            servers=self.servers,
            share=inference.memory_share(self.servers),
            cache_bytes=None if inference.kv_cache_gb is None else int(inference.kv_cache_gb * 1e9),
        )

    def _bytes_per_parameter(self, *, while_training: bool) -> float:
        share = self.trained / self.parameters
        return self.trainer.bytes_per_parameter(while_training=while_training, adapter_share=share)

    def _training_step(self, total: int) -> Budget:
        trainer = self.trainer
        parts = [*self._trainer_parts(), Part("gradients", 4 * self.trained // self.ranks)]
        state, copy = sum(part.size for part in parts), self._published_copy()
        reserved = self._engines().reserved_bytes(self.parameters, total) if self.placement.shares_gpu else 0
        limit = int(USED_SHARE_OF_FREE * (total - reserved - copy.size))
        experts, lora = self.shape.sizes.num_experts, trainer.lora
        learn = not experts or lora is None or EXPERTS in lora.target_modules
        sizes = ModelSizes(**asdict(self.shape.sizes), compute_bytes=self.compute_bytes, experts_learn=learn)
        plan = make_memory_plan(
            sizes,
            limit if trainer.memory_gb is None else int(trainer.memory_gb * 1e9),
            state=state,
            chunk=trainer.lm_head_chunk,
            longest=trainer.seq_len or 1,
            mode=trainer.activation_checkpointing,
            head_learns=trainer.lora is None,
        )
        weights = min(reserved, self.servers * self.compute_bytes * self.parameters if reserved else 0)
        parts += [
            copy,
            Part("activations", plan.bytes - state, is_certain=False),
            Part("engine's weights", weights),
            Part("engine's other memory", reserved - weights, is_certain=False),
        ]
        each = f" of each of {self.ranks} GPUs" if self.ranks > 1 else ""
        return Budget(f"GPU memory in a training step{each}", total, tuple(parts))

    def _cache_memory(self, total: int) -> int:
        """Return the bytes for the KV cache of one server; raises as the engine would."""
        inference = self.config.inference
        weights = self._engine_weights()
        if inference.kv_cache_gb is not None:
            return int(inference.kv_cache_gb * 1e9)
        if inference.engine == "vllm":
            share = inference.memory_share(self.servers) if self.placement.shares_gpu else None
            return int((share or inference.vllm.gpu_memory_utilization or 0.9) * total) - weights
        own = weights + CONTEXT_BYTES
        shared = None
        if self.placement.shares_gpu:
            alternates = self.sharing == "alternate"
            shared = ColocatedTrainer(
                self.config.output_dir if alternates else None,
                self._bytes_per_parameter(while_training=not alternates),
                self.servers,
            )
        return cache_budget(total - own, total, own, self.parameters, shared)

    def _engine_weights(self) -> int:
        """Return the bytes of weights on each GPU of a server: of one copy, or a part of it."""
        inference = self.config.inference
        if inference.engine != "vllm":
            return self.compute_bytes * self.parameters
        divided = self.shape.expert_parameters if inference.vllm.expert_parallel else 0
        others = (self.parameters - divided) // inference.vllm.tensor_parallel_size
        return self.compute_bytes * (others + divided // inference.gpus_per_server)

    def _sampling(self, total: int, memory: int, max_running: int) -> Budget:
        token_bytes = self.shape.kv_bytes(self.compute_bytes)
        blocks = blocks_within(memory, token_bytes, self.longest, max_running)
        tokens = BLOCK_SIZE * blocks
        shares = self.placement.shares_gpu
        count = self.servers if shares else 1
        parts = [
            Part("engine's weights", count * self._engine_weights()),
            Part("KV cache", count * tokens * token_bytes, is_certain=False),
            Part("engine's other memory", count * (working_bytes(total) + CONTEXT_BYTES), is_certain=False),
        ]
        if shares:
            parts = [*self._trainer_parts(), self._published_copy(), *parts]
        each = "" if shares or self.servers == 1 else f" of each of {self.servers} servers"
        note = f"; KV cache for {tokens:,} tokens, max_running = {max_running}"
        return Budget(f"GPU memory while sampling{each}", total, tuple(parts), note=note)

    # Host

    def _host(self) -> Budget:
        parts = list(self._host_on_gpu() if self.on_gpu else self._host_on_cpu())
        processes = self.ranks + self.servers
        each = GPU_PROCESS_BYTES if self.on_gpu else CPU_PROCESS_BYTES
        parts.append(Part("processes", processes * each + CPU_PROCESS_BYTES, is_certain=False))
        total = self.machine.host_memory
        if self.links:
            parts.append(Part("published versions", PUBLISHED_COPIES * self.parameters * self.compute_bytes))
        if self.machine.disk_is_memory and self.machine.free_disk is not None:
            parts.append(Part("run directory", self._disk(self.machine.free_disk).needed))
        left = max(0, total - sum(part.size for part in parts))
        saving = save_bytes(self._checkpoint_bytes(), left, self.ranks)
        parts.append(Part("saving a checkpoint", saving, is_certain=False))
        free = self.machine.free_host_memory
        note = "" if free is None or free >= sum(part.size for part in parts) else f"; {gib(free)} GiB are free now"
        return Budget("host memory", total, tuple(parts), self.machine.swap, note)

    def _host_on_gpu(self) -> Iterator[Part]:
        if self.trainer.optim.offload_state:
            yield Part("optimizer", self.trainer.optim.state_bytes * self.trained)
        if self.trainer.lora is not None and self.servers:
            size = self.servers * self.compute_bytes * self.parameters
            kept = size if keeps_base_in_memory(size, self.machine.host_memory) else 0
            yield Part("engine's base weights", kept, is_certain=False)

    def _host_on_cpu(self) -> Iterator[Part]:
        yield from (part._replace(size=part.size * self.ranks) for part in self._trainer_parts())
        yield Part("gradients", 4 * self.trained)
        if self.servers:
            yield Part("engine's weights", self.servers * self.compute_bytes * self.parameters)
            inference, token_bytes = self.config.inference, self.shape.kv_bytes(self.compute_bytes)
            free = self.machine.free_host_memory or self.machine.host_memory
            memory = int((inference.kv_cache_gb or 0) * 1e9) or int(CPU_CACHE_SHARE * free)
            most = inference.running_at_once(on_gpu=False) * self.longest * token_bytes
            yield Part("KV cache", self.servers * min(memory, most), is_certain=False)

    # Disk

    def _checkpoint_bytes(self) -> int:
        reference = self.config.trainer.reference if isinstance(self.config, RunConfig) else None
        has_reference = reference is not None and reference.every is not None
        return checkpoint_bytes(self.trained, self.trainer.optim, has_reference=has_reference)

    def _disk(self, free: int) -> Budget:
        """Return the larger of two budgets: at the last checkpoint of the training, and at the end."""
        version = self.compute_bytes * self.parameters if self.trainer.lora is None else 4 * self.trained
        publishes = isinstance(self.config, RunConfig) or self.config.evaluates
        kept = self.config.trainer.keep_weights if isinstance(self.config, RunConfig) else 1
        versions = min(kept + 1, self.config.max_steps or 1) if publishes and not self.links else 0
        merged = self.trainer.lora is None or self.trainer.lora.save_merged
        during, at_end = kept_checkpoints(self.trainer)
        if isinstance(self.config, RunConfig) and (past := self.config.trainer.past_weights) is not None:
            # Of the current step and of each checkpoint: the last multiple, and those within max_async_level.
            versions += (during + 1) * (1 + -(-past.max_async_level // past.every))
        size = self._checkpoint_bytes()
        training = (
            Part(f"{during} checkpoint{'s' * (during != 1)}", during * size),
            Part("published versions", versions * version),
        )
        linked = isinstance(self.config, RunConfig) and self.trainer.lora is None  # the last version is the final model
        end = (
            Part(f"{at_end} checkpoint{'s' * (at_end != 1)}", at_end * size),
            Part("published versions", max(versions, publishes) * version),
            Part("final model", 0 if linked else self.compute_bytes * self.parameters if merged else 4 * self.trained),
        )
        return Budget("disk", free, max(training, end, key=lambda parts: sum(part.size for part in parts)))


def kept_checkpoints(trainer: TrainingConfig) -> tuple[int, int]:
    """Return the most checkpoints on disk while one is written, and the number at the end of a run."""
    last, ckpt = trainer.max_steps or 1, trainer.ckpt
    steps = {*range(ckpt.interval, last + 1, ckpt.interval), last}
    permanent: set[int] = set()
    if ckpt.permanent_interval is not None:
        permanent = {*range(ckpt.permanent_interval, last + 1, ckpt.permanent_interval)}
    saved = sorted(steps | permanent)
    newest, one_more = saved[-ckpt.keep_last :], saved[-ckpt.keep_last - 1 :]
    # The last one is written when there are most: permanent ones only become more.
    return len(permanent.union(one_more)), len(permanent.union(newest))
