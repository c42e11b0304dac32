"""The data types of a run: task, turn, sample, rollout, group.

An episode, one `run()` of an environment on a task, returns one or more rollouts. The environment fills in turns,
rewards and messages; the orchestrator adds group, draw, samples and credit. A failed episode is a rollout with `error`
set, so that every dispatched episode returns something.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from headrace.safe_text import encodable

Message = dict[str, Any]
NOT_SAMPLED = -1
"""The entry of `Sample.versions` for a token that the policy did not sample."""
TRUNCATED = "truncated_logprobs"
"""The stream of logprobs after top-p and top-k: for metrics, not trained on."""
LATENTS = "latents"
"""The stream of latents of a policy that thinks in latent space, [tokens, hidden size] in float16: the vector that was
blended into the input embedding of a token. A row of zeros: the plain embedding."""
ROUTES = "routes"
"""The stream of routes of a model with experts, [tokens, layers * experts per token]: the experts that each layer chose
for the token, in ascending order; zeros in layers without experts. In uint8, or uint16 if there are more than 256
experts. A row of `no_route` in every place: the experts were not recorded. No layer can choose one expert twice."""

ROLES = ("", "system", "user", "assistant", "tool")
"""Author of a prompt token, by index; 0 is the chat format itself and any other role."""

TOKEN_ARRAYS = {"token_ids": np.int32, "mask": np.bool_, "logprobs": np.float32, "versions": np.int32}
"""The per-token arrays that every sample has, in the order of its fields."""
_STREAMS = "advantages rl_weights ce_weights ref_kl_weights ref_logprobs k2_weights k3_weights kl_logprobs"
KNOWN_STREAMS: dict[str, np.dtype[Any]] = dict.fromkeys(_STREAMS.split(), np.dtype(np.float32))
"""Streams that the trainer reads; it ignores other streams of a sample."""


def no_route(routes: np.ndarray) -> int:
    """Return the number that fills the row of a token without recorded experts: the trainer chooses them itself."""
    return int(np.iinfo(routes.dtype).max)


class Task(msgspec.Struct, frozen=True):
    """One task of an environment. `data` is JSON; `key` is stable across processes and restarts."""

    env: str
    data: dict[str, Any]
    key: str = ""

    def __post_init__(self) -> None:
        if not self.key:
            content = msgspec.json.encode([self.env, self.data], order="deterministic")
            msgspec.structs.force_setattr(self, "key", hashlib.sha256(content).hexdigest()[:16])


class Turn(msgspec.Struct, eq=False):
    """One model call of an episode: the exact tokens of the prompt and of the completion.

    The four sequences are converted to arrays, which take a tenth of the memory of lists.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    temperature: float
    finish_reason: str = "stop"
    truncated_logprobs: np.ndarray | None = None
    """Logprobs after top-p and top-k, renormalized; None if neither is set."""
    prompt_roles: np.ndarray | None = None
    """Per token of the prompt, the index of its role in `ROLES`; None if the renderer does not report roles."""
    latents: np.ndarray | None = None
    """[completion tokens, hidden size]: the stream of latents; None if the policy has none."""
    mask: np.ndarray | None = None
    """Per token of the completion, whether it trains, as the environment decides; None: all do."""
    routes: np.ndarray | None = None
    """[tokens - 1, layers * experts per token]: the stream of routes of prompt and completion. An engine does not
    compute the last token, so the last token has no route."""

    def __post_init__(self) -> None:
        self.prompt_ids = np.asarray(self.prompt_ids, np.int32)
        self.completion_ids = np.asarray(self.completion_ids, np.int32)
        self.logprobs = np.asarray(self.logprobs, np.float32)
        self.versions = np.asarray(self.versions, np.int32)
        lengths = {len(self.completion_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(
                f"a turn's completion_ids, logprobs and versions must have one length, not "
                f"{len(self.completion_ids)}, {len(self.logprobs)} and {len(self.versions)}"
            )
        if self.truncated_logprobs is not None:
            self.truncated_logprobs = np.asarray(self.truncated_logprobs, np.float32)
            if (count := len(self.truncated_logprobs)) != len(self.logprobs):
                raise ValueError(f"a turn of {len(self.logprobs)} tokens has {count} truncated_logprobs")
        if self.prompt_roles is not None:
            self.prompt_roles = np.asarray(self.prompt_roles, np.int8)
            if (count := len(self.prompt_roles)) != len(self.prompt_ids):
                raise ValueError(f"a turn with a prompt of {len(self.prompt_ids)} tokens has {count} prompt_roles")
        if self.latents is not None:
            self.latents = np.asarray(self.latents, np.float16)
            if self.latents.ndim != 2 or len(self.latents) != len(self.logprobs):
                raise ValueError(f"a turn of {len(self.logprobs)} tokens has latents of shape {self.latents.shape}")
        if self.mask is not None:
            mask = np.asarray(self.mask)
            if mask.shape != self.logprobs.shape or not np.isin(mask, (0, 1)).all():
                raise ValueError(
                    f"a turn of {len(self.logprobs)} tokens has a mask of shape {mask.shape} and type {mask.dtype}: "
                    "give one boolean per token of the completion"
                )
            self.mask = mask.astype(np.bool_)
        if self.routes is not None:
            tokens = len(self.prompt_ids) + len(self.completion_ids)
            if self.routes.ndim != 2 or self.routes.dtype.kind != "u" or len(self.routes) != tokens - 1:
                kind = f"shape {self.routes.shape} and type {self.routes.dtype}"
                raise ValueError(f"a turn of {tokens} tokens has routes of {kind}")

    @property
    def trained_tokens(self) -> int:
        return len(self.completion_ids) if self.mask is None else int(np.count_nonzero(self.mask))


class Sample(msgspec.Struct):
    """One training sequence: a first prompt, then completions and the observations between them.

    `mask` marks the tokens that train: those of completions, except where their turn's mask is false. Every array and
    every stream has the length of `token_ids`; a stream that the trainer does not know, and those of
    latents and routes, may have a row of numbers per token. `obs_spans` rows are (start within the completion, turn
    index, start within that turn's prompt, length): tokens between two completions that were not sampled.
    """

    token_ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    prompt_length: int
    temperature: float = 1.0
    obs_spans: list[tuple[int, int, int, int]] = msgspec.field(default_factory=list)
    streams: dict[str, np.ndarray] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in TOKEN_ARRAYS.items():
            setattr(self, name, np.asarray(getattr(self, name), dtype))
        self.check()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def completion_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def sampled(self) -> np.ndarray:
        """Which tokens the policy sampled, whether they train or not, bool."""
        return np.asarray(self.versions != NOT_SAMPLED)

    @property
    def rl_members(self) -> np.ndarray:
        """Which tokens are in the rl loss, bool."""
        weights = self.streams.get("rl_weights")
        return self.mask if weights is None else self.mask & (weights != 0)

    def check(self) -> None:
        """Raise unless every per-token array is aligned with `token_ids`."""
        named = {"mask": self.mask, "logprobs": self.logprobs, "versions": self.versions, **self.streams}
        for name, values in named.items():
            self._check_aligned(name, values)
        if not 0 <= self.prompt_length <= len(self):
            raise ValueError(f"prompt_length = {self.prompt_length}: outside a sample of {len(self)} tokens")

    def _check_aligned(self, name: str, values: np.ndarray) -> None:
        has_rows = values.ndim == 2 and name not in TOKEN_ARRAYS and name not in KNOWN_STREAMS
        if (values.shape[:1] if has_rows else values.shape) != self.token_ids.shape:
            raise ValueError(
                f"sample stream {name!r} has shape {values.shape}, but the sample has {len(self)} tokens: "
                "every stream must have one value per token"
            )

    def set_stream(self, name: str, values: np.ndarray | list[float]) -> None:
        """Attach a per-token stream; raise if its length is not that of the sample."""
        stream = np.asarray(values, np.float16 if name == LATENTS else KNOWN_STREAMS.get(name))
        self._check_aligned(name, stream)
        self.streams[name] = stream

    def truncated(self, length: int) -> Sample:
        """Return the sample cut to its first `length` tokens."""
        if len(self) <= length:
            return self
        completion = max(0, length - self.prompt_length)
        arrays: dict[str, Any] = {name: getattr(self, name)[:length] for name in TOKEN_ARRAYS}
        return Sample(
            **arrays,
            prompt_length=min(self.prompt_length, length),
            temperature=self.temperature,
            obs_spans=[(s, t, p, min(n, completion - s)) for s, t, p, n in self.obs_spans if s < completion],
            streams={name: values[:length] for name, values in self.streams.items()},
        )


class RolloutError(msgspec.Struct, frozen=True):
    """Why a rollout has no result. `reason` is the name of a counter, `detail` a message."""

    reason: str
    detail: str = ""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:  # may quote invalid Unicode from users' code
            msgspec.structs.force_setattr(self, field, encodable(str(getattr(self, field))))


class Rollout(msgspec.Struct):
    """One agent's part in one episode."""

    env: str = ""
    task_key: str = ""
    group_id: str = ""
    draw_id: int = -1
    episode: int = -1
    """Index of the rollout's episode in the group, shared by the agents of the episode; -1 if unknown."""
    credited: int = 0
    """Number of rollouts of the group that were credited together, this one included; 0 if it was not credited."""
    agent: str = "policy"
    trainable: bool = True
    reward: float = math.nan
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    messages: list[Message] = msgspec.field(default_factory=list)
    turns: list[Turn] = msgspec.field(default_factory=list)
    samples: list[Sample] = msgspec.field(default_factory=list)
    truncated: bool = False
    stop_reason: str = ""
    error: RolloutError | None = None
    timings: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def completion_tokens(self) -> int:
        """Tokens that the policy sampled, over all turns."""
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that train, over all turns."""
        return sum(turn.trained_tokens for turn in self.turns)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled any of its tokens; None if the policy sampled none."""
        return min((int(versions.min()) for versions in self._versions()), default=None)

    @property
    def newest_version(self) -> int | None:
        return max((int(versions.max()) for versions in self._versions()), default=None)

    def _versions(self) -> Iterator[np.ndarray]:
        """Yield the versions of the sampled tokens of each turn that has any: some tokens are an environment's own."""
        for turn in self.turns:
            versions = turn.versions[turn.versions != NOT_SAMPLED]
            if len(versions):
                yield versions

    @property
    def mean_advantage(self) -> float | None:
        """Mean over the tokens that train; None without advantages."""
        credit = [s.streams["advantages"][s.mask] for s in self.samples if "advantages" in s.streams]
        tokens = sum(len(values) for values in credit)
        return float(sum(values.sum() for values in credit)) / tokens if tokens else None


class Group(msgspec.Struct, frozen=True):
    """`size` episodes of one task. The id is unique: the same task may be open twice."""

    id: str
    task: Task
    size: int
    opened_version: int
    draw_id: int = -1
    together: bool = False
    """Whether its episodes start at the same time because the environment scores them against each other."""
