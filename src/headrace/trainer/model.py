"""Any Hugging Face causal language model, run on packed rows and written back as a Hugging Face directory.

Parameters are float32, whatever the files hold: the optimizer's small steps vanish in anything narrower. Compute may
be bfloat16. Left out on purpose: dropout (a policy must give the logprobs it was sampled with) and models with images
or sound. Left for later: sharded parameters, compiled layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from headrace.config.model import ModelConfig
from headrace.rollout.cost import Cost, cost_of_model
from headrace.text.hub import model_directory
from headrace.trainer import attention
from headrace.trainer.attention import UnsupportedModel
from headrace.trainer.lm_head import label_logprobs
from headrace.trainer.row import Row, make_row

_NOT_COMPUTED_HERE = ("final_logit_softcapping", "attn_logit_softcapping", "attention_chunk_size")
_COPIED_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
_NOT_COPIED = ("COMPLETE.json", "*.index.json")


def initial_model(config: ModelConfig) -> Path:
    """The directory of the model that a configuration names."""
    if config.name is None:
        raise ValueError("model.name is not set: the launcher turns model.init and model.sft into a directory")
    return model_directory(config.name)


class PackedModel:
    """A causal language model that computes the hidden states of a row."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        activation_checkpointing: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        transformers_logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        _refuse_unsupported(config, directory)
        self.directory = directory
        self.device = device
        self.dtype = dtype
        self.module, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        if report["missing_keys"]:
            raise UnsupportedModel(f"{directory} lacks the tensors {', '.join(sorted(report['missing_keys']))}")
        self.module.to(device)
        self._other_files = _read_other_files(directory)  # in memory: the directory may be a checkpoint that goes
        for part in self.module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        self._check_packing()
        self.module.train()
        if activation_checkpointing:
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._scorer = _Scorer(self.module, dtype)
        self._autocast = dtype == torch.bfloat16

    def shard(self, mesh: DeviceMesh) -> None:
        """Spread parameters, gradients and optimizer state over the ranks of a mesh, layer by layer.

        What is in no layer, the embeddings above all, tied or not, is in the root's group. Gradients are summed, not
        averaged: the loss is divided by counts over all ranks already.
        """
        precision = MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False)
        for part in (*_layers(self.module), self._scorer):
            fully_shard(part, mesh=mesh, mp_policy=precision)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo and some of NCCL's sums cannot scale on the way
        self._autocast = False  # parameters arrive in the compute type

    def score(
        self, row: Row, predictors: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor, chunk: int
    ) -> Scores:
        """Logprob and entropy of `labels`, each read off the place of the row that predicts it."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            return self._scorer(row, predictors, labels, temperatures, chunk)  # type: ignore[no-any-return]

    @property
    def cost(self) -> Cost:
        """What its sequences cost to train on, for balancing."""
        config = self.module.config
        heads = config.num_attention_heads
        return cost_of_model(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
        )

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def save_for_engine(self, directory: Path) -> None:
        """Write the model in the type it computes in, which is what an engine loads."""
        self.save(directory, self.dtype)

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face directory: the tensors, and every other file as the model came with it."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._other_files.items():
            (directory / name).write_bytes(content)
        settings = json.loads(self._other_files["config.json"])
        settings.pop("torch_dtype", None)
        settings["dtype"] = str(dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        # Parameters listed once: tied ones are tied again on load, and safetensors refuses to write them twice.
        tensors = {name: _whole(tensor.detach()).to(dtype) for name, tensor in self.module.named_parameters()}
        stored = self.module.state_dict()
        tensors |= {name: buffer for name, buffer in self.module.named_buffers() if name in stored}
        tensors = {name: t.contiguous().cpu() for name, t in revert_weight_conversion(self.module, tensors).items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "model.safetensors").chmod(0o644)  # an engine may run as another user

    def _check_packing(self) -> None:
        """Sequences with a common start, packed, must give the logits that the model itself gives for each alone."""
        sequences = [np.array([1, 2, 3, 4, 5, 6, 7]), np.array([1, 2, 3, 4, 5, 9]), np.array([8, 2])]
        with torch.no_grad():
            self.module.eval()
            own = [
                self.module(input_ids=torch.from_numpy(ids)[None].to(self.device), use_cache=False).logits[0]
                for ids in sequences
            ]
            self.module.set_attn_implementation(attention.NAME)
            row = make_row(sequences, self.device)
            packed = hidden_states(self.module, row) @ self.module.get_output_embeddings().weight.t()
        for expected, places in zip(own, row.places, strict=True):
            error = (packed[places] - expected).abs().max()
            if not error <= 1e-3 * expected.abs().max() + 1e-6:
                raise UnsupportedModel(
                    f"{self.directory}: {type(self.module).__name__} gives other logits for packed sequences than for "
                    f"each alone (by up to {error:.1g}): its layers or its head do more than causal "
                    "attention and a linear map, and packed training would be wrong"
                )


class Scores(NamedTuple):
    logprobs: torch.Tensor
    entropy: torch.Tensor
    nothing: torch.Tensor
    """A zero whose gradient reaches every parameter: ranks without a member run backward all the same."""


class _Scorer(torch.nn.Module):
    """The model and its loss head as one module, since parameters are whole only inside a module's forward pass."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype

    def forward(
        self, row: Row, predictors: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor, chunk: int
    ) -> Scores:
        hidden = hidden_states(self.model, row).to(self._dtype)
        head = self.model.get_output_embeddings().weight
        logprobs, entropy = label_logprobs(hidden.index_select(0, predictors), head, labels, temperatures, chunk)
        return Scores(logprobs, entropy, hidden[:0].sum() + logprobs[:0].sum())


def hidden_states(model: Any, row: Row) -> torch.Tensor:
    """The last hidden state of each place in the row."""
    output = model.base_model(
        input_ids=row.token_ids, position_ids=row.position_ids, use_cache=False, layout=row.layout
    )
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def _layers(model: Any) -> Iterable[Any]:
    """The decoder's layers: the longest list of modules that the model has."""
    lists = [part for part in model.base_model.modules() if isinstance(part, torch.nn.ModuleList)]
    return max(lists, key=len, default=())


def _read_other_files(directory: Path) -> dict[str, bytes]:
    """What is not tensors: configuration, tokenizer, chat template, code."""
    skipped = {path.name for pattern in _NOT_COPIED for path in directory.glob(pattern)}
    found = [path for pattern in _COPIED_FILES for path in directory.glob(pattern)]
    return {path.name: path.read_bytes() for path in found if path.name not in skipped}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts that other ranks have."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on a GPU; on a CPU float32, since few have fast bfloat16."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _refuse_unsupported(config: Any, directory: Path) -> None:
    kinds = [name.removesuffix("_config") for name in ("vision_config", "audio_config") if hasattr(config, name)]
    if kinds or config.get_text_config() is not config:
        raise UnsupportedModel(
            f"{directory} is a multimodal model ({' and '.join([config.model_type, *kinds])}): Headrace trains "
            "text-only causal language models; extract its language model first"
        )
    for name in _NOT_COMPUTED_HERE:
        if getattr(config, name, None) is not None:
            raise UnsupportedModel(
                f"{directory}: {config.model_type} uses {name}, which packed training does not compute"
            )
