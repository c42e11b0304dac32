import asyncio
import json

import pytest
import torch
from benchmarks.end_to_end import headrace_run, trl_run
from benchmarks.end_to_end.compare import device_busy
from benchmarks.end_to_end.gsm8k import coin
from benchmarks.end_to_end.report import Run, idle_share, measured_steps
from benchmarks.end_to_end.settings import Point, Settings, drawn_prompts
from benchmarks.end_to_end.stand_in import ADVANCE, STAGES, stages_of_tokens, write_stand_in

SETTINGS = Settings("gsm8k-stand-in", "model", 0, 2, 3, 4, 64, 1.0, 2e-6)


@pytest.mark.full
def test_the_stand_in_goes_through_its_stages_to_the_end(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    config = Qwen2Config(
        vocab_size=5000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    write_stand_in(tmp_path, config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    stages = stages_of_tokens(AutoTokenizer.from_pretrained(tmp_path), config.vocab_size)
    torch.manual_seed(0)
    context = (stages > 0).nonzero().squeeze(1)
    for stage in range(1, STAGES + 1):
        members = (stages == stage).nonzero().squeeze(1)
        tokens = torch.cat([part[torch.randint(len(part), (64,))] for part in (context, members)])
        with torch.inference_mode():
            probabilities = model(tokens[None], logits_to_keep=64).logits[0].softmax(1).mean(0)
        assert probabilities[stages == stage + 1].sum() == pytest.approx(ADVANCE, rel=0.4)
        assert probabilities[stages == stage].sum() == pytest.approx(1 - ADVANCE, abs=0.02)


def test_every_contender_has_the_prompts_in_the_order_that_headrace_draws():
    prompts = asyncio.run(drawn_prompts(SETTINGS))
    assert len(prompts) == SETTINGS.steps * SETTINGS.prompts
    assert len({messages[-1]["content"] for messages, _ in prompts}) == len(prompts)
    assert prompts == asyncio.run(drawn_prompts(SETTINGS))


def test_the_coin_depends_on_nothing_but_the_text():
    tosses = [coin(f"{number}", {}) for number in range(200)]
    assert 60 < sum(tosses) < 140
    assert tosses == [coin(f"{number}", {"answer": "1"}) for number in range(200)]


def test_training_of_trl_is_the_time_from_a_score_to_the_next_generation(tmp_path):
    step = {"reward": 0.5, "exact": 0.0, "mean_tokens": 280.0}
    times = [{"step": 1, "time": 110.0, "sampling_s": 9.0}, {"step": 2, "time": 118.0, "sampling_s": 6.0}]
    records = [{"began": 100.0}, *(step | each for each in times)]
    (tmp_path / trl_run.REPORTS).write_text("".join(json.dumps(record) + "\n" for record in records))
    began, points = trl_run.read(tmp_path)
    assert began == 100.0
    assert [(point.seconds, point.mean_tokens) for point in points] == [(10.0, 280.0), (18.0, 280.0)]
    assert points[0].training_s == 2.0
    assert points[1].training_s != points[1].training_s  # not known yet


def test_training_of_headrace_is_what_the_trainer_does_while_the_engine_waits(tmp_path):
    shipped = {
        "step": 1,
        "time": 110.0,
        "process": "orchestrator",
        "progress/seconds": 10.0,
        "reward/all/mean": 0.5,
        "metrics/all/exact": 0.25,
        "decode_len/all/mean": 283.0,
    }
    trained = {"step": 1, "time": 111.0, "process": "trainer", "time/forward_backward": 0.5, "time/publish": 0.25}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (shipped, trained)))
    assert headrace_run.read(tmp_path) == (100.0, [Point(1, 10.0, 0.5, 0.25, 283.0, 0.75)])


def test_idle_time_is_sampling_without_a_step_on_the_device():
    points = [Point(step, 10.0 + 3 * step, 0.5, 0.0, 280.0, 1.0) for step in range(1, 6)]
    run = Run("headrace", 0, 30.0, 0.9, points, 256, device_busy_s=6.0)
    assert measured_steps(run, 2) == [(3.0, 1.0)] * 3
    assert idle_share(run, 2) == pytest.approx(0.0)
    assert idle_share(run._replace(device_busy_s=4.5), 2) == pytest.approx(0.25)


def test_device_busy_is_extended_to_the_whole_window():
    counters = [
        {"at": at, "steps_total": 10.0, "device_busy_seconds_total": waited}
        for at, waited in ((9.0, 0.0), (11.0, 1.0), (19.0, 5.0), (21.0, 9.0))
    ]
    assert device_busy(counters, 10.0, 20.0) == pytest.approx(4.0 * 10 / 8)
    without_engine = device_busy([{"at": 11.0}, {"at": 12.0}], 10.0, 20.0)
    assert without_engine != without_engine
