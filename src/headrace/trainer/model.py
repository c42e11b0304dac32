"""A Hugging Face causal language model that runs on packed rows, on one device or sharded over ranks.

Trained parameters are float32, whatever the files contain: small optimizer steps would vanish in narrower formats.
Compute may be bfloat16, and then so is the frozen base of an adapter. Left out on purpose: dropout (a policy must
reproduce the logprobs it sampled with) and multimodal models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from headrace.errors import Failure
from headrace.inference.latents import add_gates, is_gate, write_gates
from headrace.inference.memory import ColocatedEngines
from headrace.inference.model_shape import check_weights, feed_forward_sizes, training_obstacle
from headrace.inference.rounding import MAX_ROUNDING_RATIO, WiderType, typical_difference
from headrace.inference.schema import LatentParams
from headrace.rollout.packing import Cost, cost_of_model
from headrace.trainer.attention import (
    PACKED_ATTENTION,
    KernelSetting,
    UnsupportedModel,
    available_kernel,
    head_size,
    separate_sequences,
    special_attention,
)
from headrace.trainer.experts import GROUPED_EXPERTS
from headrace.trainer.layers import checkpoint_layers, compile_layers, fsdp_shard, offload_activations
from headrace.trainer.lm_head import LabelScorer, Scores, accumulate_in_place, hidden_states, plain_logits
from headrace.trainer.lora import adapter_layers, add_lora, merged_parameters
from headrace.trainer.memory_plan import (
    MAX_ROW_TOKENS,
    USED_SHARE_OF_FREE,
    MemoryPlan,
    ModelSizes,
    RecomputeMode,
    make_memory_plan,
)
from headrace.trainer.model_files import ModelFiles, write_tensors
from headrace.trainer.packed_row import PackedRow, make_row, prefix_keys
from headrace.trainer.ranks import Ranks, whole
from headrace.trainer.routing import ReplayMode, Routing
from headrace.transport.adapter import Adapter, write_adapter, write_config

log = logging.getLogger(__name__)

MAX_CPU_LOGITS_BYTES = 256 << 20
"""Logits of one chunk on a CPU: larger chunks are slower, and 4,096 tokens of a large vocabulary take gigabytes."""
MIN_COMPILED_PARAMETERS = 50_000_000
"""Minimum parameters of all layers for which compiling pays off on a GPU: it takes about a minute."""
MAX_CPU_ACTIVATION_BYTES = 1 << 30
"""Activations of a row on a CPU."""
NEGLIGIBLE_ERROR = 1e-4
"""Typical difference of logits, as a share of the largest, that counts as rounding in float32."""


class PackedModel:
    """A causal language model that returns logprobs of the labels of a packed row; sharded over several ranks."""

    def __init__(
        self,
        directory: Path,
        ranks: Ranks | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        attention: KernelSetting = "auto",
        activation_checkpointing: RecomputeMode | Literal["auto"] = False,
        activation_offload: bool = False,
        compile: bool | Literal["auto"] = False,
        lm_head_fp32: bool = False,
        lm_head_chunk: int = 4096,
        memory: int | None = None,
        training_bytes: int = 12,
        engines: ColocatedEngines | None = None,
        longest: int = MAX_ROW_TOKENS,
        trust_remote_code: bool = False,
        load: bool = True,
        lora: Mapping[str, Any] | None = None,
        latents: LatentParams | None = None,
        router_replay: ReplayMode = "off",
    ) -> None:
        """`memory`: bytes of the GPU that a step may use, parameters included; None for the free memory.

        `training_bytes`: bytes of gradient and optimizer state per trained parameter on the GPU. The memory of
        `engines` on the same GPU is left to them, also before they start. `longest`: maximum tokens of a sequence.
        `load`: whether to read the directory's tensors; a checkpoint is loaded later. `latents`: how the policy thinks
        in latent space, if it does. `router_replay`: what is done with recorded experts, see `Routing`.
        """
        self.ranks = ranks = ranks or Ranks()
        self.directory, self.device, self.dtype = directory, ranks.device, dtype
        self.files = ModelFiles(directory)
        base_dtype = dtype if lora is not None and ranks.size == 1 else torch.float32
        self.module = _load_module(directory, trust_remote_code, load, base_dtype)
        separate_sequences(self.module)
        if ranks.size == 1:
            self.module.to(self.device)  # otherwise sharding moves each layer
        if load:
            try:
                self._check_packing()
            except (Failure, torch.OutOfMemoryError):
                raise
            except Exception as error:
                fact = (
                    f"{type(self.module).__name__} cannot be run on packed sequences: {type(error).__name__}: {error}"
                )
                raise UnsupportedModel(fact, key="model.name", value=directory) from error
        _use_packed_code(self.module)
        self.routing = Routing(self.module, router_replay)
        self._sizes = _layer_sizes(self.module.config)
        special = special_attention(self.module)
        self.kernel = available_kernel(attention, self.device, dtype, head_size(self.module.config), special)
        self.adapter = None if lora is None else add_lora(self.module, **lora, base=str(directory))
        if base_dtype != torch.float32:  # the residual stream is float32 nevertheless
            self.module.get_input_embeddings().register_forward_hook(lambda _, __, output: output.float())
        if latents is not None and latents.kind == "hybrid":
            add_gates(self.module, directory)
        self.module.train()
        self._layers = list(_decoder_layers(self.module))
        parameters = self.module.parameters()
        self._state_bytes = sum(p.nbytes + (training_bytes * p.numel() if p.requires_grad else 0) for p in parameters)
        self._recompute_setting: RecomputeMode | Literal["auto"] = activation_checkpointing
        if self.device.type == "cpu":
            logit_bytes = 4 * self.module.get_output_embeddings().weight.shape[0]
            lm_head_chunk = min(lm_head_chunk, max(1, MAX_CPU_LOGITS_BYTES // logit_bytes))
        self._offloads, self._chunk, self._memory, self._longest = activation_offload, lm_head_chunk, memory, longest
        self._engines = engines
        if compile == "auto":
            size = sum(parameter.numel() for layer in self._layers for parameter in layer.parameters())
            compile = self.device.type == "cuda" and size >= MIN_COMPILED_PARAMETERS
        self.compiles = compile
        """Whether layers are compiled at their first forward pass."""
        if ranks.size == 1:
            accumulate_in_place(self.module.get_input_embeddings())
        in_place = ranks.size == 1
        self._scorer = LabelScorer(self.module, dtype, lm_head_fp32, lm_head_chunk, in_place=in_place, latents=latents)
        self._autocast = dtype == torch.bfloat16 and ranks.size == 1
        if ranks.size > 1:
            _ = self.plan  # wraps the layers, before they are sharded
            fsdp_shard(self._layers, self._scorer, ranks.mesh(), dtype)

    @cached_property
    def plan(self) -> MemoryPlan:
        """The memory plan, made and applied to the layers at the first access."""
        plan = self._make_plan()
        for mode in {mode for mode in plan.modes if mode}:
            pairs = zip(self._layers, plan.modes, strict=False)
            checkpoint_layers([layer for layer, each in pairs if each == mode], mode)
        if self.compiles:
            compile_layers(self._layers, sharded=self.ranks.size > 1)
        if self._offloads:
            offload_activations(self._layers)
        self._scorer.keeps_logits = plan.keeps_logits
        if self.device.type == "cuda":
            log.info("%s", plan)
        return plan

    def pack_row(self, sequences: list[np.ndarray], routes: list[np.ndarray] | None = None) -> PackedRow:
        """Pack sequences, with the `routes` of their tokens, for this model's device and kernel."""
        keys = None if routes is None else [prefix_keys(*pair) for pair in zip(sequences, routes, strict=True)]
        return make_row(sequences, self.device, self.kernel, keys=keys, routes=routes)

    def score(
        self,
        row: PackedRow,
        predictors: torch.Tensor,
        labels: torch.Tensor,
        temperatures: torch.Tensor,
        latents: torch.Tensor | None = None,
        *,
        follow_routes: bool | None = None,
    ) -> Scores:
        """Return logprob and entropy of `labels`; `predictors` are the row indices that predict them.

        `latents` are those of the labels, if they have any. `follow_routes`: take the row's experts, by default if
        they are replayed.
        """
        _ = self.plan
        follow = self.routing.mode == "replay" if follow_routes is None else follow_routes
        self.routing.set_routes(row.routes, row.token_ids, follow=follow)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            return self._scorer(row, predictors, labels, temperatures, latents)  # type: ignore[no-any-return]

    def logprobs(
        self,
        row: PackedRow,
        predictors: torch.Tensor,
        labels: torch.Tensor,
        temperatures: torch.Tensor,
        *,
        follow_routes: bool | None = None,
    ) -> torch.Tensor:
        """Return logprobs as `score` does, without gradients. Every rank must call it with the same row."""
        # Compiled layers run with gradients enabled: training has compiled that program already.
        with torch.set_grad_enabled(self.compiles and self.ranks.size == 1):
            scores = self.score(row, predictors, labels, temperatures, follow_routes=follow_routes)
        logprobs = scores.logprobs.detach()
        if isinstance(self._scorer, FSDPModule):
            self._scorer.reshard()  # the backward pass would do it, but there is none
        return logprobs

    @property
    def cost(self) -> Cost:
        """The cost of training on a sequence, for load balancing."""
        return cost_of_model(**{name: size for name, size in self._sizes.items() if "expert" not in name})

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and buffers. Tied parameters are listed once, and tied again on load."""
        parameters: dict[str, torch.Tensor] = {n: p.detach() for n, p in self.module.named_parameters()}
        stored = self.module.state_dict().keys()
        return parameters | {name: buffer for name, buffer in self.module.named_buffers() if name in stored}

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """Return the trained tensors, which a checkpoint contains: with an adapter only its tensors."""
        return self.tensors() if self.adapter is None else {n: p.detach() for n, p in self.named_parameters().items()}

    def write_files(self, directory: Path) -> None:
        """Write the files of a checkpoint other than tensors."""
        self.files.write(directory)
        if self.adapter is not None:
            write_config(directory, self.adapter)

    def save_for_engine(self, directory: Path) -> None:
        """Write the adapter, or the model in its compute dtype, for engines. Every rank must call it."""
        if self.adapter is None:
            self.save(directory, self.dtype)
            return
        trained = {name: whole(tensor) for name, tensor in self.trained_tensors().items()}
        if self.ranks.is_first:
            write_adapter(directory, Adapter(self.adapter, adapter_layers(trained)))
            write_gates(directory, trained)

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face directory, complete on return. Every rank must call it.

        An adapter is merged into the base model.
        """
        if self.ranks.is_first:
            self.files.write(directory, dtype)
        self.ranks.barrier()
        merge = partial(merged_parameters, scaling=1.0 if self.adapter is None else self.adapter.scaling)
        tensors = self.tensors()
        gates = {name: whole(tensor) for name, tensor in tensors.items() if is_gate(name)}
        others = {name: tensor for name, tensor in tensors.items() if name not in gates}
        write_tensors(directory, self.module, others, dtype, self.ranks, merge)
        if self.ranks.is_first:
            write_gates(directory, gates)

    def _make_plan(self) -> MemoryPlan:
        """Return a plan for the free memory; on a CPU nothing is recomputed unless configured."""
        config, choice = self.module.config, self._recompute_setting
        if self.device.type != "cuda":
            bytes_per_token = 34 * 4 * config.num_hidden_layers * config.hidden_size  # rough estimate
            tokens = max(self._longest, min(MAX_ROW_TOKENS, MAX_CPU_ACTIVATION_BYTES // bytes_per_token))
            return MemoryPlan((False if choice == "auto" else choice,) * len(self._layers), False, tokens, 0)
        experts = [p.numel() for p in self.module.parameters() if p.ndim == 3 and p.requires_grad]
        sizes = ModelSizes(
            **self._sizes,
            compute_bytes=self.dtype.itemsize,
            is_compiled=self.compiles,
            experts_learn=bool(experts) or not self._sizes.get("num_experts"),
        )
        limit = self._memory
        if limit is None:
            free, total = torch.cuda.mem_get_info(self.device)
            available = free + torch.cuda.memory_reserved(self.device)
            if self._engines is not None:
                available = min(available, total - self._engines.reserved_bytes(self.module.num_parameters(), total))
            limit = int(USED_SHARE_OF_FREE * available)
        limit = -self.ranks.max(-limit)
        compute_bytes = self.dtype.itemsize
        # Trained experts in the compute type, and the largest gradient of a stack before it is added.
        copies = 0 if self.compiles or self.dtype == torch.float32 else compute_bytes * sum(experts)
        copies += (4 + 2 * compute_bytes) * max(experts, default=0)
        state = self._state_bytes // self.ranks.size + copies
        learns = self.module.get_output_embeddings().weight.requires_grad
        plan = make_memory_plan(
            sizes, limit, state=state, chunk=self._chunk, longest=self._longest, mode=choice, head_learns=learns
        )
        if plan.bytes > limit:
            log.warning("a step may not fit into its %.1f GiB: %s", limit / 2**30, plan)
        return plan

    def _check_packing(self) -> None:
        """Raise unless packed sequences with a shared prefix give the logits of separate forward passes."""
        sequences = [np.array([1, 2, 3, 4, 5, 6, 7]), np.array([1, 2, 3, 4, 5, 9, 10, 11, 12]), np.array([8, 2, 13])]
        inputs = [torch.from_numpy(ids)[None].to(self.module.device) for ids in sequences]
        with torch.no_grad():
            self.module.eval()
            own = [self.module(input_ids=ids, use_cache=False).logits[0] for ids in inputs]
            if self.module.dtype is torch.float32:
                exact = own
            else:
                with WiderType(self.module.dtype):
                    exact = [self.module(input_ids=ids, use_cache=False).logits[0] for ids in inputs]
            self.module.train()  # as in training: some routers choose otherwise there
            _use_packed_code(self.module)
            row = make_row(sequences, self.module.device)
            packed = plain_logits(self.module, hidden_states(self.module, row))
        for places, plain, expected in zip(row.places, own, exact, strict=True):
            error = typical_difference(packed[places], expected)
            rounding = typical_difference(plain, expected) + NEGLIGIBLE_ERROR * float(expected.abs().max())
            if not error <= MAX_ROUNDING_RATIO * rounding:
                raise UnsupportedModel(
                    f"{type(self.module).__name__} gives other logits for packed sequences than for separate ones, "
                    f"by {error:.2g}, of which rounding explains {rounding:.2g}. Its layers or head compute "
                    "more than causal attention and a linear map",
                    key="model.name",
                    value=self.directory,
                )


def _layer_sizes(config: Any) -> dict[str, int]:
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_size(config),
        "vocab_size": config.vocab_size,
        **feed_forward_sizes(config.to_dict()),
    }


def _decoder_layers(model: Any) -> Iterable[Any]:
    """Return the decoder's layers: the first ModuleList with the configured number of layers."""
    lists = (part for part in model.base_model.modules() if isinstance(part, torch.nn.ModuleList))
    return next((part for part in lists if len(part) == model.config.num_hidden_layers), ())


def _load_module(directory: Path, trust_remote_code: bool, load: bool, dtype: torch.dtype) -> Any:
    """Return the module on the CPU, without dropout, with the directory's tensors or uninitialized."""
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    if (obstacle := training_obstacle(config.to_dict())) is not None:
        raise UnsupportedModel(obstacle, key="model.name", value=directory)
    if load:
        check_weights(directory)
        module, report = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"]))
            raise UnsupportedModel(f"lacks the tensors {missing}", key="model.name", value=directory)
    else:
        with no_init_weights():
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        module.tie_weights()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return module


def _use_packed_code(module: Any) -> None:
    module.set_attn_implementation(PACKED_ATTENTION)
    module.set_experts_implementation(GROUPED_EXPERTS)
