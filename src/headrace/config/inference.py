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
    expert_parallel: bool = False
    """Divide the experts of a layer over all GPUs of a server, `tensor_parallel_size * data_parallel_size`, instead of
    each expert's matrices over those of one copy."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of each GPU's memory that vLLM takes; unset: its default, or 0.4 for all servers together if the trainer
    uses the same GPU."""
    start_timeout: float = Field(600.0, gt=0)
    """Seconds until the server must answer its health check."""
    max_lora_rank: int = Field(0, ge=0, le=512)
    """The highest rank of LoRA adapters that it serves; 0: published adapters are merged into the model instead."""
    max_loras: int = Field(4, ge=1)
    """Adapters, or versions of one, that are served at the same time."""
    args: list[str] = Field(default_factory=list)
    """Further command line arguments of vLLM's server."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of vLLM's server."""


class HttpConfig(Config):
    """`[inference.http]`: limits of the server's connections, TLS, and who may call it."""

    header_timeout: float = Field(10.0, gt=0)
    """Seconds for the head of a request, from the connection or from its first byte."""
    body_timeout: float = Field(60.0, gt=0)
    """Seconds for the body of a request; also the longest time for which a client may not read its response."""
    idle_timeout: float = Field(120.0, gt=0)
    """Seconds for which a connection without a request stays open, once it has sent a valid key. Clients of a run close
    theirs after 60."""
    admin_timeout: float = Field(540.0, gt=0)
    """Seconds for an admin call, such as an update of the weights. Less than the 600 after which clients give up."""
    max_unauthenticated: int = Field(4096, ge=1)
    """Connections that have not sent a valid key yet; of more, the oldest is closed."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names, in addition to those of this machine, by which clients may address a server without an API key."""
    keys_file: Path | None = None
    """A TOML file with `api` and `admin`, lists of valid keys, instead of the environment variables. It is read again
    when it changes."""
    tls_certificate: Path | None = None
    """The certificate, with its chain, in PEM; set: the server speaks HTTPS."""
    tls_key: Path | None = None
    """The private key of the certificate, in PEM; unset: it is in the same file."""


class InferenceConfig(Config):
    engine: Literal["embedded", "vllm"] = "embedded"
    """`embedded`: Headrace's engine, for CPUs and single GPUs; `vllm`: vLLM, which must be installed."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model that is served; filled from `model`."""
    output_dir: Path | None = None
    """Filled from `output_dir`."""
    served_name: str | None = None
    """The model name in the API; unset: the name of its directory, or its name on the hub. The path works, too."""
    renderer: RendererConfig = Field(default_factory=RendererConfig)
    """How chat messages become tokens; filled from `orchestrator.renderer`."""
    host: str = "127.0.0.1"
    """The address that the server listens on."""
    port: int = Field(0, ge=0, le=65535)
    """TCP port; 0: any free port, which is written to the run directory."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt plus completion, in tokens; unset: the run's `seq_len`, else the model's own limit (at most 4096).

    A run whose policy scores its own samples with hints before them (opsd, rlcsd) needs more: there it is
    2 * seq_len + 256 unless set, since a hint may be as long as a response.
    """
    max_running: int | None = Field(None, ge=1)
    """Requests that are decoded together; others are queued. Unset: 128 on a CPU, 256 on a GPU; in a run 512 or 1024 on
    a GPU where so many are in flight, that raises the tokens per second, and the KV cache holds them at half length."""
    max_waiting: int = Field(4096, ge=0)
    """Requests in the queue; further ones are rejected with HTTP status 429, to be retried."""
    max_step_tokens: int | None = Field(None, ge=16)
    """Tokens per engine step: longer prompts are prefilled in chunks, between decode steps. Unset: 16384 on a GPU with
    flash attention (not in float32, nor with capped scores), else 2048. Embedded only."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """KV cache in GB. Unset: enough for `max_running` requests of full length, but at most 90% of a GPU's free memory;
    65% of what the trainer leaves if they alternate on one GPU, 30% if they overlap; on a CPU an eighth of the free
    memory, since running requests have a second copy. Requests that do not fit are preempted and recomputed."""
    compile: bool = True
    """Compile layers: about a third faster, but the start takes about 10 s longer on a GPU. On a CPU it needs a C
    compiler, and layers like Llama's or Qwen's in float32. Embedded only."""
    speculative_tokens: int = Field(0, ge=0, le=64)
    """Most tokens that are guessed ahead for a request while at most 32 run, and at most half of `max_running`: what
    others with its prompt sampled. 8 makes each of few requests faster where guesses are often right; 0: no guesses.
    The distribution stays the same. Embedded only, on a GPU."""
    prefix_cache: bool = True
    """Reuse the KV cache of prompts with the same prefix, as long as the weights do not change."""
    max_body_mb: float = Field(32.0, gt=0)
    """Largest request body in MB; larger ones are refused."""
    http: HttpConfig = Field(default_factory=HttpConfig)
    api_key_var: str = "HEADRACE_API_KEY"
    """The environment variable with the API key of clients. Required on an address that other machines reach."""
    admin_key_var: str = "HEADRACE_ADMIN_KEY"
    """The environment variable with the key for weight updates. Unset: a run generates one; a server without a run
    refuses such requests."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """Whether the KV cache of requests in flight is recomputed or kept when the weights are updated."""
    routed_experts: bool = False
    """Record which experts each layer chooses for each token, for requests that want them. A run sets it where the
    trainer needs it (`trainer.router_replay`)."""
    seed: int = 0
    """Seed of requests that do not set one; filled from `seed`."""

    def notices(self) -> list[str]:
        """Warn about settings of the embedded engine where vLLM samples."""
        unused = ("max_step_tokens", "speculative_tokens") if self.engine == "vllm" else ()
        return [
            f"inference: {key} = {value} has no effect with vLLM: it is a setting of the embedded engine."
            for key in unused
            if (value := getattr(self, key))
        ]

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

    def memory_share(self, servers: int) -> float | None:
        """Return the fraction of a GPU's memory for each of `servers` servers on the trainer's GPU.

        None if the engine measures at its start how much memory is free.
        """
        if self.engine != "vllm":
            return None
        return self.vllm.gpu_memory_utilization or round(SHARED_GPU_MEMORY / servers, 3)
