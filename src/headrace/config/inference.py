"""`[inference]`: the server that samples the policy, and the engine behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.config.base import Config
from headrace.config.model import ModelConfig, RendererConfig

RUNNING_ON_GPU, RUNNING_ON_CPU = 256, 128
SHARED_GPU_MEMORY = 0.4
"""Fraction of a GPU's memory for all vLLM servers on it together, if the trainer uses the same GPU."""


class VllmConfig(Config):
    """`[inference.vllm]`: how vLLM is started, where `engine` is `vllm`."""

    python: Path | None = None
    """The interpreter of the environment that has vLLM; unset: the one that runs Headrace."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share one copy of the model."""
    data_parallel_size: int = Field(1, ge=1)
    """Copies of the model behind one server."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """The share of each GPU's memory that vLLM takes; unset: its default, or .4 where the trainer is there too, for all
    servers together."""
    start_timeout: float = Field(600.0, gt=0)
    """Seconds until it must answer."""
    max_lora_rank: int = Field(0, ge=0, le=512)
    """The largest rank of adapters that it serves beside the model; 0: none, and published adapters are merged."""
    max_loras: int = Field(4, ge=1)
    """Adapters, or versions of one, that are sampled at once."""
    args: list[str] = Field(default_factory=list)
    """More arguments of vLLM's server, as on its command line."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables for it."""


class InferenceConfig(Config):
    engine: Literal["embedded", "vllm"] = "embedded"
    """Our own, for CPUs and single GPUs, or vLLM, which must be installed."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model that is served; filled from `model`."""
    output_dir: Path | None = None
    """Filled from `output_dir`."""
    served_name: str | None = None
    """What clients call the model; unset: its directory or its name on the hub."""
    renderer: RendererConfig = Field(default_factory=RendererConfig)
    """How chat messages become tokens; filled from `orchestrator.renderer`."""
    host: str = "127.0.0.1"
    """The address that the server listens on."""
    port: int = Field(0, ge=0, le=65535)
    """0 takes any free port; the run directory says which."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt plus completion; unset: the run's `seq_len`, else the model's own limit (at most 4096).

    A run whose policy scores its own samples with hints before them (opsd, rlcsd) needs more: there it is
    2 * seq_len + 256 unless set, since a hint may be as long as a response.
    """
    max_running: int | None = Field(None, ge=1)
    """Requests decoded together; more wait in line. Unset: 256 on a GPU, 128 on a CPU."""
    max_waiting: int = Field(4096, ge=0)
    """Requests that may wait in line; more are turned away with HTTP status 429, to come again later."""
    max_step_tokens: int | None = Field(None, ge=16)
    """Tokens that one step computes: longer prompts take several, so that others go on meanwhile. Unset: 16384 on a
    GPU where flash attention computes the model (not in float32, nor with capped scores), else 2048. Embedded only."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """Memory for keys and values. Unset: what `max_running` longest requests need, but at most 90% of what a GPU has
    left; 65% of what the trainer leaves where the two take turns on one, 30% where they compute at once; on a CPU an
    eighth of what is free, since requests in progress have theirs twice. Requests that lose their place come again."""
    compile: bool = True
    """Whether layers are compiled: a third faster, but on a GPU a start takes longer by ten seconds or so. On a CPU
    that needs a C compiler, and layers like Llama's or Qwen's in float32. Embedded only."""
    prefix_cache: bool = True
    """Whether prompts that begin alike are computed once, as long as the weights are the same."""
    max_body_mb: float = Field(32.0, gt=0)
    """Requests with a larger body are refused."""
    api_key_var: str = "HEADRACE_API_KEY"
    """The environment variable with the key that clients must show. On an address that others reach it must be set."""
    admin_key_var: str = "HEADRACE_ADMIN_KEY"
    """The same for whoever moves weights. Unset: a run makes its own; a server without a run takes no such calls."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV cache of requests that are in flight when new weights arrive."""
    seed: int = 0
    """What decides the samples of requests without a seed; filled from `seed`."""

    def running_at_once(self, *, on_gpu: bool) -> int:
        """Return `max_running`, or its default for the device if it is unset."""
        return self.max_running or (RUNNING_ON_GPU if on_gpu else RUNNING_ON_CPU)

    @property
    def gpus_per_server(self) -> int:
        return self.vllm.tensor_parallel_size * self.vllm.data_parallel_size if self.engine == "vllm" else 1

    @property
    def extra_start_timeout_s(self) -> float:
        """Seconds that a server of this engine may take to start, in addition to `launch.start_timeout`."""
        return self.vllm.start_timeout if self.engine == "vllm" else 0.0

    @property
    def loads_fused_experts(self) -> bool:
        """Whether the engine can load published weights of a model with fused experts."""
        return self.engine == "vllm"

    def memory_share(self, servers: int) -> float | None:
        """Return the fraction of a GPU's memory for each of `servers` servers on the trainer's GPU.

        None if the engine measures at its start how much memory is free.
        """
        if self.engine != "vllm":
            return None
        return self.vllm.gpu_memory_utilization or round(SHARED_GPU_MEMORY / servers, 3)
