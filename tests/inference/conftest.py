"""A tiny Qwen3 with a byte-level tokenizer, and a real server in front of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from headrace.inference.weights.reading import READ_TIMEOUT_S
from headrace.rollout.version import Version
from headrace.transport.run_dir import RunDir
from headrace.transport.weights import WeightStore

torch.set_num_threads(1)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SERVE = """
import sys
from pathlib import Path
from headrace.config.inference import InferenceConfig
from headrace.inference.server.main import serve
from headrace.observe.status import Status
from headrace.transport.run_dir import RunDir

run = RunDir(Path(sys.argv[1]))
status = Status(run.status, "inference")
http = {"admin_timeout": float(sys.argv[3])}
serve(InferenceConfig(model={"name": sys.argv[2]}, max_running=8, max_model_len=128, http=http), status=status, run=run)
status.close("done")
"""


def make_qwen3(seed: int, head_dim: int = 16, max_position_embeddings: int = 256) -> Qwen3ForCausalLM:
    """Weights large enough that attention matters to every logit."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        initializer_range=0.25,
        eos_token_id=258,
        bos_token_id=None,
        pad_token_id=256,
    )
    return Qwen3ForCausalLM(config).eval()


def write_tokenizer(directory: Path) -> None:
    """One token per byte, and a chat format, beside a model."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def make_model() -> Callable[[int], Qwen3ForCausalLM]:
    return make_qwen3


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return make_qwen3(0)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    make_qwen3(0).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture
def publish(tmp_path: Path) -> Callable[[PreTrainedModel, Version], Path]:
    """Publish a model's weights the way the trainer does."""
    store = WeightStore(tmp_path / "weights")

    def publish(model: PreTrainedModel, version: Version) -> Path:
        store.publish(version, model.save_pretrained)
        return store.path(version)

    return publish


class ServerProcess:
    """A server of the tiny model, in a process of its own."""

    def __init__(self, root: Path, model_directory: Path, admin_timeout: float = READ_TIMEOUT_S) -> None:
        self.run = RunDir(root)
        arguments = (str(root), str(model_directory), str(admin_timeout))
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, *arguments])
