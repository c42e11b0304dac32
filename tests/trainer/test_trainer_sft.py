"""Supervised training from data to a model directory."""

import json
import logging
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.cli.main import main
from headrace.config.sft import SftConfig, SftDataConfig
from headrace.launch.saved_config import save
from headrace.observe.metrics import read_metrics
from headrace.observe.status import Status
from headrace.rollout.version import Version
from headrace.text.training_examples import SftConversation
from headrace.trainer import checkpoint, sft
from headrace.trainer.checkpoint import TrainState
from headrace.trainer.sft_data import open_examples, open_rows
from headrace.transport.run_dir import RunDir
from tests.observe.metrics_page import undocumented


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    status = Status(tmp_path / "status", "sft")
    yield status
    status.close("done")


def settings(output: Path, model: dict[str, Any], data: dict[str, Any], **others: Any) -> SftConfig:
    return SftConfig.model_validate(
        {
            "output_dir": output,
            "model": model,
            "data": {"batch_size": 4, **data},
            "renderer": {"name": "qwen3", "enable_thinking": False},
            "max_steps": 6,
            "seq_len": 64,
            "optim": {"lr": 3e-3},
            **others,
        }
    )


ENV = {"env": "reverse-text", "args": {"demonstrate_copies": 0.7}}


def run(config: SftConfig, status: Status, resume: str | None = None) -> Path:
    return sft.SftTrainer(config, resume=resume, stopped=threading.Event(), status=status).run()


def test_training_on_demonstrations_lowers_the_loss_and_leaves_a_model(
    tmp_path: Path, tiny_model: Path, status: Status, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        path = run(settings(tmp_path / "out", {"name": str(tiny_model)}, ENV, max_steps=20), status)
    assert path == tmp_path / "out" / "model"
    AutoModelForCausalLM.from_pretrained(path)
    records = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert [record["process"] for record in records] == ["sft"] * 20
    assert records[0]["loss"] == pytest.approx(5.8, abs=0.4)  # ln(320)
    assert records[0]["ce/nll"] == pytest.approx(records[0]["loss"])
    assert records[-1]["loss"] < 2.5
    assert {"optim/lr", "optim/grad_norm", "perf/trained_tokens_per_second", "time/step"} <= records[0].keys()
    assert undocumented(records) == []
    assert {"step": 20, "max_steps": 20, "loss": records[-1]["loss"]}.items() <= status.current.gauges.items()
    assert [message.split(":")[0] for message in caplog.messages if "tokens/s" in message] == [
        "step 10 of 20",
        "step 20 of 20",
    ]


@pytest.mark.parametrize("source", ["env", "path"])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, tiny_model: Path, status: Status, source: str):
    data = ENV
    if source == "path":
        rows = [{"prompt": f"say {n}", "completion": str(n)} for n in range(5)]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = {"path": tmp_path / "data.jsonl"}
    model = {"name": str(tiny_model)}
    straight = load_file(run(settings(tmp_path / "a", model, data), status) / "model.safetensors")
    # The schedule is constant, so a run to step 3 is the first half of a run to step 6.
    run(settings(tmp_path / "b", model, data, max_steps=3), status)
    assert checkpoint.read_state(tmp_path / "b" / "checkpoints" / "step-00000003").examples == 12
    resumed = load_file(run(settings(tmp_path / "b", model, data), status, resume="latest") / "model.safetensors")
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert [record["step"] for record in read_metrics(tmp_path / "b" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_packing_changes_no_loss_and_both_ways_reach_the_same(tmp_path: Path, tiny_model: Path, status: Status):
    losses = {}
    for pack in (True, False):
        data = {"env": "reverse-text", "batch_size": 8, "pack": pack}
        run(settings(tmp_path / str(pack), {"name": str(tiny_model)}, data, max_steps=20), status)
        losses[pack] = [record["loss"] for record in read_metrics(tmp_path / str(pack) / "metrics.jsonl")]
    # Where Adam makes much of a gradient's rounding, the gradient is near its eps: that moves parameters, not the loss.
    assert losses[True] == pytest.approx(losses[False], abs=1e-4)
    assert losses[True][-1] < 2.0  # from ln(320) = 5.8


def validations(output: Path) -> dict[int, float]:
    return {r["step"]: r["val/loss"] for r in read_metrics(output / "metrics.jsonl") if "val/loss" in r}


def test_validation_runs_first_last_and_in_between_and_a_resume_leaves_none_out(
    tmp_path: Path, tiny_model: Path, status: Status
):
    model = {"name": str(tiny_model)}
    held_out = {"env": "reverse-text", "args": {"split": "eval"}, "max_examples": 5, "interval": 4}
    run(settings(tmp_path / "a", model, ENV, validation=held_out), status)
    straight = validations(tmp_path / "a")
    assert undocumented(read_metrics(tmp_path / "a" / "metrics.jsonl")) == []
    assert list(straight) == [0, 4, 6]
    assert straight[0] == pytest.approx(5.8, abs=0.4)  # ln(320)
    assert straight[6] < straight[4] < straight[0]
    run(settings(tmp_path / "b", model, ENV, validation=held_out, max_steps=4), status)
    (tmp_path / "b" / "metrics.jsonl").unlink()  # as if it had been killed between checkpoint and validation
    run(settings(tmp_path / "b", model, ENV, validation=held_out), status, resume="latest")
    assert validations(tmp_path / "b") == {4: straight[4], 6: straight[6]}


def test_validation_does_not_change_what_is_trained(tmp_path: Path, tiny_model: Path, status: Status):
    model, held_out = {"name": str(tiny_model)}, {"env": "reverse-text", "max_examples": 3, "interval": 1}
    without = load_file(run(settings(tmp_path / "a", model, ENV, max_steps=3), status) / "model.safetensors")
    config = settings(tmp_path / "b", model, ENV, max_steps=3, validation=held_out)
    tensors = load_file(run(config, status) / "model.safetensors")
    assert all(torch.equal(tensors[name], without[name]) for name in without)


def test_rows_that_validation_holds_out_are_never_trained_on(tmp_path: Path):
    rows = [{"question": f"say {n}", "answer": str(n)} for n in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": tmp_path / "data.jsonl", "columns": {"prompt": "question", "completion": "answer"}}

    def answers(conversations: Iterable[SftConversation]) -> list[str]:
        return [conversation.messages[-1]["content"] for conversation in conversations]

    for most, held in ((100, 5), (3, 3)):
        config = settings(tmp_path / "out", {}, data, validation={"fraction": 0.25, "max_examples": most})
        training, held_out = open_examples(config, open_rows(config.data), 0)
        trained, validated = answers(islice(training, 45)), answers(held_out)
        assert (len(set(trained)), len(validated)) == (15, held)
        assert not set(trained) & set(validated)


def test_validation_has_rows_of_its_own_whatever_the_seed_of_the_run(tmp_path: Path):
    for name in ("train", "test"):
        rows = [{"prompt": "?", "completion": f"{name} {n}"} for n in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    validation = {"path": tmp_path / "test.jsonl", "max_examples": 4}
    sets = []
    for seed in (0, 1):
        data = {"path": tmp_path / "train.jsonl"}
        config = settings(tmp_path / "out", {}, data, seed=seed, validation=validation)
        sets.append([c.messages[-1]["content"] for c in open_examples(config, open_rows(config.data), 0)[1]])
    assert sets[0] == sets[1]
    assert len(set(sets[0])) == 4 and all(text.startswith("test") for text in sets[0])


EVAL = {"interval": 2, "env": [{"id": "reverse-text"}]}


def test_versions_are_offered_for_evaluation_unless_it_is_behind_and_the_last_one_always_is(
    tmp_path: Path, tiny_model: Path, status: Status
):
    weights = RunDir(tmp_path / "out").weights
    weights.acknowledge(Version(0, 0))  # an orchestrator is there, and takes no more than that
    config = settings(tmp_path / "out", {"name": str(tiny_model)}, ENV, eval=EVAL)
    run(config, status)
    assert weights.published() == [Version(0, 2), Version(0, 6)]
    run(config, status, resume="latest")
    assert weights.published() == [Version(0, 2), Version(0, 6), Version(1, 6)]
    weights.acknowledge(Version(1, 6))
    run(settings(tmp_path / "out", {"name": str(tiny_model)}, ENV, eval=EVAL, max_steps=9), status, resume="latest")
    assert weights.published()[-1] == Version(2, 9)


def test_training_ends_without_an_orchestrator_and_only_its_last_version_waits_for_one(
    tmp_path: Path, tiny_model: Path, status: Status
):
    here, stopped = RunDir(tmp_path / "out"), threading.Event()
    config = settings(tmp_path / "out", {"name": str(tiny_model)}, ENV, eval=EVAL)
    training = threading.Thread(target=sft.SftTrainer(config, stopped=stopped, status=status).run)
    training.start()
    while training.is_alive() and "orchestrator" not in status.current.waiting_for:
        time.sleep(0.02)
    assert here.final_model.is_dir()
    assert here.weights.published() == []
    stopped.set()
    training.join()
    assert here.weights.published() == []


def write_answers(path: Path, numbers: Iterable[int], **more: Any) -> None:
    rows = [{**more, "prompt": f"say {number}", "completion": str(number)} for number in numbers]
    path.write_text("\n".join(map(json.dumps, rows)))


def test_a_resumed_run_says_that_its_data_has_changed(tmp_path: Path, tiny_model: Path, status: Status):
    data, model = {"path": tmp_path / "data.jsonl"}, {"name": str(tiny_model)}
    write_answers(data["path"], range(6))
    run(settings(tmp_path / "out", model, data, max_steps=1), status)
    assert not status.current.notices
    write_answers(data["path"], range(5))
    run(settings(tmp_path / "out", model, data, max_steps=1), status, resume="latest")
    (notice,) = status.current.notices
    assert notice.startswith(f"{data['path']} has changed since the checkpoint of step 1: 6 examples before, 5 now.")


def test_changed_data_is_reported_once_and_only_if_content_changed(tmp_path: Path, status: Status):
    path, state = tmp_path / "data.jsonl", TrainState(step=3)
    said = []
    for numbers, more in (
        (range(6), {}),
        (range(6), {"id": "new"}),
        ([0, 1, 2, 3, 5, 4], {}),
        ([0, 1, 2, 3, 5, 4], {}),
    ):
        write_answers(path, numbers, **more)
        sft.notify_changed_rows(open_rows(SftDataConfig(path=path)), state, status)
        said.append(len(status.current.notices))
    assert said == [0, 0, 1, 1]
    assert "still 6 examples" in status.current.notices[0]


def test_a_hugging_face_dataset_is_trained_on_by_its_name(tmp_path: Path, tiny_model: Path, status: Status):
    rows = [{"question": f"{n}+{n}?", "answer": f"#### {n + n}"} for n in range(10)]
    datasets.Dataset.from_list(rows, split="train").save_to_disk(tmp_path / "sums")
    data = {"name": str(tmp_path / "sums"), "columns": {"prompt": "question", "completion": "answer"}}
    validation = {"fraction": 0.2, "interval": 3}
    run(settings(tmp_path / "out", {"name": str(tiny_model)}, data, max_steps=3, validation=validation), status)
    assert list(validations(tmp_path / "out")) == [0, 3]


def test_examples_longer_than_seq_len_are_cut_and_counted(tmp_path: Path, tiny_model: Path, status: Status):
    config = settings(tmp_path / "out", {"name": str(tiny_model)}, ENV, seq_len=24, max_steps=1)
    run(config, status)
    (record,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert record["data/truncated"] > 0
    assert record["data/not_learned"] == 0
    assert record["progress/tokens_trained"] <= 4 * 24


def test_stop_ends_training_without_a_final_model(tmp_path: Path, tiny_model: Path, status: Status):
    stopped = threading.Event()
    stopped.set()
    path = sft.SftTrainer(
        settings(tmp_path / "out", {"name": str(tiny_model)}, ENV), stopped=stopped, status=status
    ).run()
    assert not path.exists()


def test_tools_that_the_chat_template_leaves_out_are_reported(tmp_path: Path, tiny_model: Path, status: Status):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    data, tool = {"path": tmp_path / "data.jsonl"}, {"type": "function", "function": {"name": "add", "parameters": {}}}
    write_answers(data["path"], range(2), tools=[tool])
    run(settings(tmp_path / "out", {"name": str(model)}, data, max_steps=1, renderer={"name": "default"}), status)
    (notice,) = status.current.notices
    assert notice.startswith(f"{data['path']} has tools, but the model's chat template")


@pytest.fixture
def as_a_process() -> Iterator[None]:
    """Put back what a process of a run changes for good: handlers of signals, and the log."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:], logger.level = handlers, level
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_a_process")
def test_the_trainer_of_an_sft_run_hands_its_metrics_on_to_monitors(tmp_path: Path, tiny_model: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = RunDir(tmp_path / "run")
    save(settings(out.root, {"name": str(tiny_model)}, ENV, max_steps=2, tensorboard={}), out)
    assert main(["trainer", str(out.root)]) == 0
    events = EventAccumulator(str(out.root / "tensorboard"))
    events.Reload()
    losses = [(record["step"], pytest.approx(record["loss"])) for record in read_metrics(out.metrics)]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == losses
    assert len(losses) == 2
