"""The tokens of a traced step: their gradients against the formulas in float64, what is null, what a trace costs."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import headrace.runfile  # noqa: F401 (registers the losses)
from headrace.config.trainer import TrainerConfig
from headrace.observe.status import Status
from headrace.observe.token_view import largest
from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer import rl
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.ranks import Ranks
from headrace.trainer.step import TrainStep
from headrace.trainer.token_table import COLUMNS, delete_sampled_exports, write_token_table
from headrace.trainer.tokens import COMPONENTS, PENALTIES, StepTokens
from headrace.transport.digests import DIGESTS
from headrace.transport.run_dir import ExportHeader, RunDir, TokenExports, read_header
from tests.trainer.training_samples import (
    ARCHITECTURES,
    Gradients,
    make_sample,
    mixed_samples,
    random_samples,
    write_random_model,
)

MICRO_BATCH = 48

# Limits close enough to what a random model gives that each loss masks some tokens and keeps others.
LOSSES: dict[str, dict[str, Any]] = {
    "default": {"dppo_mask_low": 1e-3, "dppo_mask_high": 2e-3, "adv_tau": 0.7, "kl_tau": 0.01},
    "ipo": {"ipo_threshold": 1e-3, "kl_tau": 0.02},
    "ppo_clip": {"eps_low": 0.1, "eps_high": 0.2},
    "gspo": {"eps_low": 0.02, "eps_high": 0.03},
    "cispo": {"eps_max": 1.1},
    "icepop": {"alpha": 0.8, "beta": 1.2},
    "reinforce": {},
}
REF_KL = {"mask_low": 1e-3, "kl_tau": 0.03}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), ARCHITECTURES["qwen3"])


def batch_of(samples: list[Sample]) -> Batch:
    return Batch(7, 1, [BatchSample(s, ("letters", "numbers")[n % 2], n // 2) for n, s in enumerate(samples)])


def train_step(directory: Path, optimizer: type[Optimizer], kind: str = "default", **settings: Any) -> TrainStep:
    model = PackedModel(directory, lm_head_chunk=64)
    losses = rl.make_losses(TrainerConfig(loss={"type": kind, **settings}, ref_kl=REF_KL))
    return TrainStep(model, optimizer(model.named_parameters()), losses, MICRO_BATCH)


def export(step: TrainStep, samples: list[Sample], path: Path, limit: int | None = None) -> pa.Table:
    batch = batch_of(samples)
    result = step.run(pack(samples, 32), 1e-2, envs=[entry.env for entry in batch.samples], traced=True)
    assert result is not None and result.trace is not None
    write_token_table(path, result.trace, batch, Ranks(), limit)
    return pq.read_table(path)


def column(table: pa.Table, name: str) -> np.ndarray:
    """As float64, with NaN for null."""
    return table[name].cast(pa.float64()).to_numpy(zero_copy_only=False)


class Formula:
    """The gradient of one sample's tokens, from the batch and the trainer's logprobs alone, in float64."""

    def __init__(self, sample: Sample, trainer_logprobs: np.ndarray) -> None:
        self.members = {
            "rl": sample.mask & (sample.streams["rl_weights"] != 0),
            "ce": sample.streams["ce_weights"] != 0,
            "ref_kl": sample.streams["ref_kl_weights"] != 0,
        }
        self.members |= {name: self.members["rl"] & (sample.streams[f"{name}_weights"] != 0) for name in PENALTIES}
        for inside in self.members.values():
            inside[0] = False
        self.weights = {name: sample.streams[f"{name}_weights"].astype(np.float64) for name in COMPONENTS}
        self.t = np.nan_to_num(trainer_logprobs)
        self.l = self.t - sample.logprobs.astype(np.float64)
        self.d = np.exp(self.t) - np.exp(sample.logprobs.astype(np.float64))
        self.rho = np.exp(self.l)
        self.a = sample.streams["advantages"].astype(np.float64)
        self.ref = sample.streams["ref_logprobs"].astype(np.float64)
        self.gap = sample.streams["kl_logprobs"].astype(np.float64) - self.t

    def gradient(self, kind: str, counts: dict[str, int]) -> np.ndarray:
        w, m, keep = self.weights, self.members, 1.0 - self.masked(kind)
        if kind == "gspo":  # every member of a sequence moves the one ratio
            ratio = np.exp(self.l[m["rl"]].sum() / max(1, m["rl"].sum()))
            rl = m["rl"] * -(w["rl"] * self.a * keep * ratio)[m["rl"]].sum() / max(1, m["rl"].sum())
        else:
            rl = m["rl"] * w["rl"] * self.slope(kind, keep)
        pull = -(1.0 - self.masked_by_ref_kl()) * (self.ref - self.t) * self.rho + 2 * 0.03 * self.l
        parts = {"rl": rl, "ce": m["ce"] * -w["ce"], "ref_kl": m["ref_kl"] * w["ref_kl"] * pull}
        parts |= {"k2": m["k2"] * w["k2"] * -self.gap, "k3": m["k3"] * w["k3"] * -np.expm1(self.gap)}
        return sum(part / max(1, counts["rl" if name in PENALTIES else name]) for name, part in parts.items())

    def slope(self, kind: str, keep: np.ndarray) -> np.ndarray:
        match kind:
            case "default":
                return -0.7 * keep * self.a * self.rho + 2 * 0.01 * self.l
            case "ipo":
                return -keep * self.a * self.rho + 2 * 0.02 * self.l
            case "ppo_clip" | "icepop":
                return -keep * self.a * self.rho
            case "cispo":
                return -np.minimum(self.rho, 1.1) * self.a
        return -self.a

    def masked(self, kind: str) -> np.ndarray:
        match kind:
            case "default":
                return np.where(self.a > 0, self.d > 2e-3, self.d < -1e-3)
            case "ipo":
                return abs(self.d) > 1e-3
            case "ppo_clip":
                return np.where(self.a > 0, self.rho > 1.2, (self.a < 0) & (self.rho < 0.9))
            case "gspo":
                s = np.exp(self.l[self.members["rl"]].mean()) if self.members["rl"].any() else 1.0
                return np.where(self.a > 0, s > 1.03, (self.a < 0) & (s < 0.98))
            case "cispo":
                return self.rho > 1.1
            case "icepop":
                return (self.rho < 0.8) | (self.rho > 1.2)
        return np.zeros(len(self.t), np.bool_)

    def masked_by_ref_kl(self) -> np.ndarray:
        return self.d < -1e-3


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_and_masks_are_those_of_the_formulas(kind: str, directory: Path, tmp_path: Path):
    samples = mixed_samples(seed=1)
    assert len(StepTokens(pack(samples, 32)).cut(MICRO_BATCH)) >= 2
    table = export(train_step(directory, Gradients, kind, **LOSSES[kind]), samples, tmp_path / "step")
    numbers = column(table, "sample")
    formulas = [Formula(s, column(table, "trainer_logprobs")[numbers == n]) for n, s in enumerate(samples)]
    counts = {name: sum(int(f.members[name].sum()) for f in formulas) for name in COMPONENTS}
    assert read_header(table.schema.metadata, "table").counts == counts

    members = {name: np.concatenate([f.members[name] for f in formulas]) for name in COMPONENTS}
    assert (members["rl"] & members["ce"] & members["ref_kl"]).any()
    for name, inside in members.items():
        np.testing.assert_array_equal(column(table, f"in_{name}"), inside)
    scored = np.logical_or.reduce(list(members.values()))
    gradients = np.concatenate([f.gradient(kind, counts) for f in formulas])
    np.testing.assert_allclose(column(table, "gradient"), np.where(scored, gradients, np.nan), rtol=1e-5, atol=1e-8)

    masked = np.concatenate([f.masked(kind) for f in formulas])
    by_ref_kl = np.concatenate([f.masked_by_ref_kl() for f in formulas])
    said = members["rl"] if kind != "reinforce" else np.zeros(len(scored), np.bool_)
    np.testing.assert_array_equal(column(table, "rl_masked"), np.where(said, masked, np.nan))
    np.testing.assert_array_equal(column(table, "ref_kl_masked"), np.where(members["ref_kl"], by_ref_kl, np.nan))
    assert kind == "reinforce" or 0 < masked[members["rl"]].mean() < 1
    assert 0 < by_ref_kl[members["ref_kl"]].mean() < 1
    assert np.isnan(column(table, "ce_masked")).all()


def test_gradients_times_logprobs_backpropagate_to_the_gradient_of_the_step(directory: Path, tmp_path: Path):
    samples = mixed_samples(seed=2)
    step = train_step(directory, Gradients, **LOSSES["default"])
    table = export(step, samples, tmp_path / "step")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    gradients = torch.from_numpy(np.nan_to_num(column(table, "gradient")))
    start = 0
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logprobs = (model(ids[None]).logits[0, :-1] / sample.temperature).log_softmax(-1).gather(-1, ids[1:, None])
        (logprobs[:, 0] @ gradients[start + 1 : start + len(ids)]).backward()
        start += len(ids)
    for name, parameter in model.named_parameters():
        kept = step.optimizer.kept[name].double()
        torch.testing.assert_close(kept, parameter.grad, rtol=1e-3, atol=1e-5 * float(parameter.grad.abs().max()))


def test_shares_are_those_of_all_tokens_and_sum_to_one(directory: Path, tmp_path: Path):
    table = export(train_step(directory, Gradients), mixed_samples(seed=3), tmp_path / "step")
    sizes = abs(column(table, "gradient"))
    total = np.nansum(sizes)
    np.testing.assert_allclose(column(table, "share"), sizes / total, rtol=1e-5)
    assert np.nansum(column(table, "share")) == pytest.approx(1, abs=1e-6)
    assert read_header(table.schema.metadata, "table").gradient_sum == pytest.approx(total)


def test_a_traced_step_gives_the_same_bits(directory: Path):
    samples = mixed_samples(seed=4)
    plain, traced = (train_step(directory, Optimizer) for _ in range(2))
    for _ in range(2):
        before = plain.run(pack(samples, 32), 1e-2)
        after = traced.run(pack(samples, 32), 1e-2, traced=True)
        assert before.trace is None
        assert (before.metrics, before.grad_norm) == (after.metrics, after.grad_norm)
    parameters = traced.model.named_parameters()
    for name, parameter in plain.model.named_parameters().items():
        assert torch.equal(parameter, parameters[name]), name


def test_rows_are_all_tokens_in_order_with_nulls_where_nothing_is_known(directory: Path, tmp_path: Path):
    rollout = make_sample([5, 6, 7, 8], 2, temperature=0.5, version=3, advantages=[0, 0, 1, -1])
    observed = make_sample([9, 10, 11], 3, advantages=[0] * 3, ce_weights=[0, 0, 0.5])  # not sampled
    long = make_sample(list(range(40)), 35, advantages=[1.0] * 40)  # cut at 32 tokens, before its completion
    table = export(train_step(directory, Gradients), [rollout, observed, long], tmp_path / "step")
    rows = table.to_pylist()
    assert [(row["sample"], row["position"]) for row in rows] == [
        *((0, n) for n in range(4)),
        *((1, n) for n in range(3)),
        *((2, n) for n in range(32)),
    ]
    assert [row["token_id"] for row in rows[:7]] == [5, 6, 7, 8, 9, 10, 11]
    assert [(row["env"], row["rollout"]) for row in (rows[0], rows[4], rows[7])] == [
        ("letters", 0),
        ("numbers", 0),
        ("letters", 1),
    ]

    computed = {"trainer_logprobs", "entropy", "gradient", "share"}
    compared = {"inference_logprobs", "log_ratio", "ratio", "mismatch_kl"}
    no_streams = {f"{name}_weights" for name in COMPONENTS} | {"ref_logprobs", "kl_logprobs"}
    masks = {f"{name}_masked" for name in COMPONENTS}
    assert nulls(rows[1]) == computed | compared | no_streams | masks | {"version"}  # context
    assert nulls(rows[2]) == no_streams | masks - {"rl_masked"}
    assert nulls(rows[6]) == compared | no_streams - {"ce_weights"} | masks | {"version"}  # an observation in ce
    assert (rows[2]["version"], rows[2]["temperature"], rows[2]["loss_mask"]) == (3, 0.5, True)
    assert rows[2]["inference_logprobs"] == pytest.approx(-0.7)
    log_ratio = rows[2]["trainer_logprobs"] - rows[2]["inference_logprobs"]
    assert rows[2]["log_ratio"] == pytest.approx(log_ratio, rel=1e-6)
    assert rows[2]["ratio"] == pytest.approx(np.exp(log_ratio), rel=1e-6)
    assert rows[2]["mismatch_kl"] == pytest.approx(np.exp(log_ratio) - log_ratio - 1, rel=1e-6)
    assert rows[6]["gradient"] == -0.5  # -w / N_ce: the only member
    header = read_header(table.schema.metadata, "table")
    assert (header.step, header.incarnation, header.counts) == (7, 1, {"rl": 2, "ce": 1, "ref_kl": 0, "k2": 0, "k3": 0})


def nulls(row: dict[str, Any]) -> set[str]:
    return {name for name, value in row.items() if value is None}


def test_every_column_says_what_it_is(directory: Path, tmp_path: Path):
    table = export(train_step(directory, Gradients), random_samples(1, 2), tmp_path / "step")
    assert table.column_names == list(COLUMNS)
    for field in table.schema:
        assert field.metadata[b"description"].decode() == COLUMNS[field.name][1]


def test_a_broken_token_is_distinguished_from_the_others(directory: Path, tmp_path: Path):
    broken = make_sample([5, 6, 7], 1, advantages=[0, float("nan"), 1])
    table = export(train_step(directory, Optimizer), [broken], tmp_path / "step")
    assert np.isnan(table["gradient"][1].as_py())
    assert np.isfinite(table["gradient"][2].as_py())
    assert table["share"].null_count == 3
    assert read_header(table.schema.metadata, "table").gradient_sum is None


def test_a_step_that_trains_nothing_has_no_shares(directory: Path, tmp_path: Path):
    table = export(train_step(directory, Gradients), [make_sample([5, 6], 2)], tmp_path / "step")
    assert (table.num_rows, table["share"].null_count, table["gradient"].null_count) == (2, 2, 2)


def test_a_step_that_is_written_again_replaces_itself(directory: Path, tmp_path: Path):
    run = RunDir(tmp_path)
    for count in (4, 2):
        export(train_step(directory, Gradients), random_samples(1, count), run.tokens.path(7))
    assert run.tokens.steps() == [7]
    assert {path.name for path in run.tokens.directory.rglob("*")} == {"step-00000007", "part-0.parquet", DIGESTS}
    assert pq.read_table(run.tokens.path(7))["sample"].to_numpy().max() == 1


def test_a_loss_of_ones_own_may_say_what_it_masks(directory: Path, tmp_path: Path):
    own = {"import_path": "tests.trainer.custom_losses:drops_long_shots", "kwargs": {"below": -4.6}}
    samples = random_samples(seed=5, count=6)
    table = export(train_step(directory, Gradients, "custom", **own), samples, tmp_path / "step")
    members = column(table, "in_rl") == 1
    masked = column(table, "rl_masked")[members]
    np.testing.assert_array_equal(masked, column(table, "trainer_logprobs")[members] < np.float32(-4.6))
    np.testing.assert_array_equal(column(table, "gradient")[members] == 0, masked == 1)
    assert 0 < masked.mean() < 1


def test_a_loss_of_ones_own_may_leave_it_out(directory: Path, tmp_path: Path):
    own = {"import_path": "tests.trainer.custom_losses:mean_advantage"}
    table = export(train_step(directory, Gradients, "custom", **own), random_samples(5, 4), tmp_path / "step")
    assert table["rl_masked"].null_count == table.num_rows


def test_a_newer_header_is_refused():
    header = ExportHeader(1, 0, {}, 1.0, schema=2)
    with pytest.raises(Exception, match=r"tokens.*\b2\b"):
        read_header({b"headrace": msgspec.json.encode(header)}, "tokens")


@pytest.mark.parametrize(
    ("chosen", "steps"),
    [
        ({"steps": [2, 5]}, [2, 5]),
        ({"interval": 9}, [9, 18]),
        ({"interval": 9, "steps": [1]}, [1, 9, 18]),
        ({}, [1, 10, 20, 23]),
        ({"sample": 0}, []),
    ],
)
def test_steps_are_chosen_by_number_and_by_interval_and_sampled_by_default(chosen: dict[str, Any], steps: list[int]):
    export = TrainerConfig(token_export=chosen).token_export
    assert [step for step in range(1, 24) if export.includes(step, last=23)] == steps


def test_a_sample_has_the_sequences_with_the_largest_gradients_whole(directory: Path, tmp_path: Path):
    samples = random_samples(seed=3, count=12)
    everything = export(train_step(directory, Gradients), samples, tmp_path / "all")
    some = export(train_step(directory, Gradients), samples, tmp_path / "some", limit=4)
    chosen = {row["sample"] for row in largest(everything, everything.num_rows).to_pylist()[:4]}
    kept = some["sample"].unique().to_pylist()
    assert len(kept) == 4
    assert chosen <= set(kept)
    assert some.equals(everything.filter(pc.is_in(everything["sample"], pa.array(kept, pa.int32()))))
    assert largest(some, 4).equals(largest(everything, 4))
    assert read_header(everything.schema.metadata, "all").sequences is None
    assert read_header(some.schema.metadata, "some").sequences == 12


def test_a_token_that_is_not_finite_is_always_in_the_sample(directory: Path, tmp_path: Path):
    broken = make_sample([5, 6, 7], 1, advantages=[0, float("nan"), 1])
    samples = [*random_samples(seed=3, count=6), broken]
    table = export(train_step(directory, Optimizer), samples, tmp_path / "step", limit=1)
    assert table["sample"].to_pylist() == [6, 6, 6]


def test_only_samples_are_removed_and_not_those_to_keep(directory: Path, tmp_path: Path):
    exports, step = TokenExports(tmp_path), train_step(directory, Gradients)
    for number, limit in ((1, 1), (2, None), (10, 1), (20, 1)):
        export(step, random_samples(1, 2), exports.path(number), limit)
    delete_sampled_exports(exports, keep=(1, 20))
    assert exports.steps() == [1, 2, 20]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    status = Status(tmp_path / "status", "trainer")
    yield status
    status.close("done")


@pytest.mark.parametrize(
    ("chosen", "steps", "sequences"),
    [({"steps": [2], "interval": 3}, [2, 3], 4), ({"sample": 2}, [1, 3], 2)],
)
def test_a_run_writes_the_steps_that_were_chosen(
    tmp_path: Path, tiny_model: Path, status: Status, chosen: dict[str, Any], steps: list[int], sequences: int
):
    run = RunDir(tmp_path / "run")
    for step in (1, 2, 3):
        samples = [BatchSample(sample, "letters", n) for n, sample in enumerate(random_samples(step, 4))]
        run.batches.prepare(Batch(step, 0, samples))
        run.batches.announce(step)
    config = TrainerConfig.model_validate(
        {
            "model": {"name": str(tiny_model)},
            "output_dir": run.root,
            "max_steps": 3,
            "seq_len": 32,
            "token_export": chosen,
        }
    )
    rl.RlTrainer(config, stopped=threading.Event(), status=status).run()
    assert run.tokens.steps() == steps
    table = pq.read_table(run.tokens.path(3))
    samples = table["sample"].unique().to_pylist()
    assert len(samples) == sequences
    assert table.num_rows == sum(len(random_samples(3, 4)[sample]) for sample in samples)
    assert read_header(table.schema.metadata, "table").step == 3
