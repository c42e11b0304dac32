"""What the server answers about recorded runs is what their files contain."""

import base64
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from headrace.errors import BadInput
from headrace.observe.histograms import count
from headrace.observe.metrics import History, MetricsLog, read_metrics
from headrace.observe.status import ProcessStatus
from headrace.rollout.types import Rollout, Sample
from headrace.text.tokenizer import Tokenizer
from headrace.tools.view.charts import suggest_charts
from headrace.tools.view.events import RunEvents
from headrace.tools.view.export import export
from headrace.tools.view.runs import RunFolder, describe_run
from headrace.tools.view.series import MetricsTable, downsample, sample_records
from headrace.tools.view.token_text import INCOMPLETE, TokenTexts
from headrace.transport.journal import Journal
from headrace.transport.rollout_files import RolloutFiles, write_rollouts
from headrace.transport.run_dir import RunDir
from tests.tools.view.client import RECORDED, browser, run_id

RL = RunDir(RECORDED / "rl")
DTYPES = {"f32": "<f4", "i32": "<i4", "u8": "u1"}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return browser()


@pytest.fixture(scope="module")
def rl(client: TestClient) -> str:
    return f"/api/runs/{run_id(client, 'rl')}"


def answer(client: TestClient, path: str) -> Any:
    reply = client.get(path)
    assert reply.status_code == 200, reply.text
    return reply.json()


def decoded(array: dict[str, Any]) -> np.ndarray:
    if "fill" in array:
        return np.full(array["length"], array["fill"], DTYPES[array["type"]])
    return np.frombuffer(base64.b64decode(array["data"]), DTYPES[array["type"]])


def test_the_list_has_every_run_with_its_progress(client: TestClient):
    runs = {run["name"]: run for run in answer(client, "/api/runs")["runs"]}
    history = History(read_metrics(RL.metrics))
    assert set(runs) == {"rl", "sft", "hackable"}
    assert runs["rl"]["sparkline"] == [value for _, value in history.train_reward()]
    assert (runs["rl"]["step"], runs["rl"]["state"]) == (history.step, "finished")
    assert runs["sft"]["reward_name"] == "loss"


def test_settings_name_what_differs_and_the_main_ones(client: TestClient):
    settings = answer(client, "/api/settings")
    id = run_id(client, "rl")
    assert dict(zip(settings["keys"], settings["values"][id], strict=True))["seq_len"] == 64
    assert settings["runs"][id]["algorithms"] == {"reverse-text": "grpo", "copy": "rae"}


def test_series_are_those_of_the_metrics(client: TestClient, rl: str):
    series = answer(client, f"{rl}/series")["series"]
    history = History(read_metrics(RL.metrics))
    assert list(zip(*series["reward/all/mean"].values(), strict=True)) == history.train_reward()
    assert list(zip(*series["loss"].values(), strict=True)) == history.loss()


def test_the_parts_of_a_lane_are_its_whole_time(client: TestClient, rl: str):
    lanes = answer(client, f"{rl}/lanes")["lanes"]
    assert [lane["process"] for lane in lanes][:2] == ["trainer", "orchestrator"]
    for lane in lanes[:1]:
        parts = np.array([part["seconds"] for part in lane["parts"]])
        assert parts.sum(axis=0) == pytest.approx(lane["total"])


def write_metrics(path: Path, steps: list[int]) -> None:
    log = MetricsLog(path, "trainer")
    for number, step in enumerate(steps):
        log.log(step, {"loss": float(number), "progress/rollouts": 1, "reward/all/mean": number / 7})


def test_steps_that_a_resume_repeated_are_replaced(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [1, 2, 3, 4, 2, 3])
    steps, values = MetricsTable(path).points(["loss"])["loss"]
    assert list(zip(steps.tolist(), values.tolist(), strict=True)) == History(read_metrics(path)).loss()


def test_columns_grow_with_the_file_and_skip_a_cut_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    table = MetricsTable(path)
    assert len(table.points(["loss"])["loss"][0]) == 0
    write_metrics(path, [1, 2])
    assert table.points(["loss"])["loss"][0].tolist() == [1, 2]
    with open(path, "ab") as file:
        file.write(b'{"step":3,"time":1.0,"los')
    assert table.points(["loss", "reward/all/mean"])["reward/all/mean"][0].tolist() == [1, 2]
    write_metrics(path, [4])
    assert table.points(["loss", "reward/all/mean"])["loss"][0].tolist() == [1, 2, 4]


def test_a_notice_is_at_the_step_whose_record_came_after_it(tmp_path: Path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(RL.root, run.root)
    records = [{"step": n, "time": 10.0 * n, "process": "trainer", "loss": 0} for n in (1, 2, 3)]
    run.metrics.write_bytes(msgspec.json.Encoder().encode_lines(records))
    notices = [f"notice {n}" for n in range(4)]
    status = ProcessStatus("trainer", 1, 0.0, "finished", notices=notices, notice_times=[0.0, 15.0, 99.0])
    run.status.mkdir(exist_ok=True)
    (run.status / "trainer.json").write_bytes(msgspec.json.encode(status))
    client = browser(run.root)
    shown = [n for n in answer(client, f"/api/runs/{run_id(client, 'run')}")["notices"] if n["process"] == "trainer"]
    assert [(notice["text"], notice["step"]) for notice in shown] == list(zip(notices, [1, 2, 3, None], strict=True))


@pytest.mark.parametrize("buckets", [2, 10])
def test_histograms_are_added_up_over_ranges_of_steps(tmp_path: Path, buckets: int):
    run = RunDir(tmp_path / "run")
    shutil.copytree(RL.root, run.root)
    log = MetricsLog(run.metrics, "trainer")
    for step in range(1, 5):
        log.log(100 + step, {"histogram/ratio": count("ratio", [1.0] * step).encode()})
    log.log(104, {"histogram/ratio": count("ratio", [1.0] * 9).encode()})  # again, after a resume
    client = browser(run.root)
    path = f"/api/runs/{run_id(client, 'run')}/histograms?buckets={buckets}"
    (histogram,) = [h for h in answer(client, path)["histograms"] if h["name"] == "ratio"]
    assert len(histogram["bounds"]) + 1 == len(histogram["counts"][0])
    expected = {2: ([101, 103], [3, 12]), 10: ([101, 102, 103, 104], [1, 2, 3, 9])}[buckets]
    assert (histogram["step"], [sum(column) for column in histogram["counts"]]) == expected
    assert "histogram/ratio" not in answer(client, f"/api/runs/{run_id(client, 'run')}")["names"]
    log.log(105, {"histogram/ratio": "damaged"})
    assert client.get(path).status_code == 400


def test_a_single_environment_has_no_second_line_beside_that_of_all():
    names = ["loss", "loss/math", "reward/all/mean", "reward/math/mean", "eval/math/avg@1"]
    charts = {chart["title"]: chart["names"] for chart in suggest_charts(names)}
    assert charts == {"Reward": ["reward/all/mean"], "Evaluation": ["eval/math/avg@1"], "Loss": ["loss"]}
    both = [*names, "reward/code/mean"]
    assert {name for chart in suggest_charts(both) for name in chart["names"]} == set(both)


@pytest.mark.parametrize(("points", "buckets"), [(10, 10), (1000, 7), (999, 100), (5, 600), (0, 5)])
def test_a_bucket_has_the_mean_and_the_ends_of_its_points(points: int, buckets: int):
    steps, values = np.arange(points) * 3, np.random.default_rng(0).normal(size=points)
    merged = downsample(steps, values, buckets)
    assert len(merged["step"]) <= buckets
    if points > buckets:
        starts = np.searchsorted(steps, merged["step"])
        for place, (start, end) in enumerate(zip(starts, [*starts[1:], points], strict=True)):
            part = values[start:end]
            assert merged["mean"][place] == pytest.approx(part.mean())
            assert (merged["min"][place], merged["max"][place]) == (part.min(), part.max())
    else:
        assert merged["mean"] == values.tolist()


def test_a_step_lists_every_rollout_in_its_group_best_first(client: TestClient, rl: str):
    listed, saved = answer(client, f"{rl}/steps/4"), RolloutFiles(RL.rollouts).read(4)
    assert listed["rollouts"]["reward"] == [entry.rollout.reward for entry in saved]
    assert sorted(row for group in listed["groups"] for row in group["rows"]) == list(range(len(saved)))
    for group in listed["groups"]:
        rewards = [saved[row].rollout.reward for row in group["rows"]]
        assert rewards == sorted(rewards, reverse=True)
        assert {saved[row].rollout.group_id for row in group["rows"]} == {group["id"]}


def test_a_rollout_has_its_tokens_with_text_and_recorded_values(client: TestClient, rl: str):
    tokenizer = Tokenizer(RL.final_model)
    for row, saved in enumerate(RolloutFiles(RL.rollouts).read(4)):
        shown = answer(client, f"{rl}/steps/4/rollouts/{row}")
        assert shown["messages"] == saved.rollout.messages
        for sample, entry in zip(saved.rollout.samples, shown["samples"], strict=True):
            assert decoded(entry["ids"]).tolist() == sample.token_ids.tolist()
            assert decoded(entry["values"]["advantages"]).tolist() == sample.streams["advantages"].tolist()
            assert decoded(entry["values"]["mask"]).tolist() == sample.mask.tolist()
            assert len(entry["text"]) == entry["length"] == len(sample)
            whole = tokenizer.decode(sample.token_ids.tolist())
            assert "".join(entry["text"]).replace(INCOMPLETE, "") == whole.replace(INCOMPLETE, "")


def test_a_character_of_several_tokens_is_the_text_of_the_first():
    tokenizer = Tokenizer(RL.final_model)
    ids = tokenizer.encode("é🙂x")
    texts = TokenTexts(tokenizer).of(ids)
    assert "".join(texts) == "é🙂x"
    assert [text for text in texts if text] == ["é", "🙂", "x"]
    assert TokenTexts(tokenizer).of([]) == []


def test_shares_of_all_tokens_of_a_step_add_up_to_one(client: TestClient, rl: str):
    shares = {"share": 0.0, "share_estimate": 0.0}
    listed = answer(client, f"{rl}/steps/4")
    for row in listed["rollouts"]["row"]:
        for sample in answer(client, f"{rl}/steps/4/rollouts/{row}")["samples"]:
            for name in shares.keys() & sample["values"].keys():
                shares[name] += float(np.nansum(decoded(sample["values"][name]).astype(np.float64)))
    assert shares["share_estimate"] == pytest.approx(1.0, abs=1e-5)
    assert shares["share"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", ["rl", "hackable"])
def test_the_credit_of_every_recorded_rollout_is_explained(client: TestClient, name: str):
    base = f"/api/runs/{run_id(client, name)}"
    explained = 0
    for step in answer(client, base)["steps"][-1:] if name == "hackable" else (1, 4):
        listed = answer(client, f"{base}/steps/{step}")["rollouts"]
        shares = []
        for row in listed["row"]:
            credit = answer(client, f"{base}/steps/{step}/rollouts/{row}/credit")
            shares.append(credit["share"]["estimate"] or 0.0)
            totals = {bar["stage"]: bar["total"] for bar in credit["bars"]}
            if listed["advantage"][row] is not None:
                assert totals["tokens"] == pytest.approx(listed["advantage"][row])
            explained += credit["exact"] and abs(credit["unexplained"]) < 1e-6
        assert sum(shares) == pytest.approx(1.0)
    assert explained or name == "hackable"


def test_code_of_the_user_is_not_imported_to_explain_credit(tmp_path: Path):
    shutil.copytree(RL.root, tmp_path / "rl")
    config = tmp_path / "rl" / "config.toml"
    mine = 'type = "grpo"\nterms = [{ import_path = "surely_not_here:term" }]'
    config.write_text(config.read_text().replace('type = "grpo"\nterms = []', mine))
    client = browser(tmp_path)
    credit = answer(client, f"/api/runs/{run_id(client, 'rl')}/steps/4/rollouts/0/credit")
    assert credit["exact"] is False
    assert any("orchestrator.algo.terms" in note for note in credit["notes"])


def test_search_finds_a_text_of_any_case(client: TestClient, rl: str):
    text = RolloutFiles(RL.rollouts).read(3)[0].rollout.messages[0]["content"]
    hits = answer(client, f"{rl}/search?text={text.upper()}")["hits"]
    assert (3, 0) in {(hit["step"], hit["row"]) for hit in hits}
    assert all(hit["match"] == text for hit in hits)
    assert answer(client, f"{rl}/search?text={text}&limit=1")["more"] is (len(hits) > 1)


def test_every_draw_of_the_journal_has_a_life(client: TestClient, rl: str):
    with closing(Journal(RL.journal, read_only=True)) as journal:
        expected = {draw.id: state for draw, state, _, _ in journal.draws()}
    listed = answer(client, f"{rl}/draws?limit=1000")
    assert dict(zip(listed["draws"]["id"], listed["draws"]["state"], strict=True)) == expected
    for id, state in expected.items():
        draw = answer(client, f"{rl}/draws/{id}")
        assert draw["state"] == state
        whats = [event["what"] for event in draw["events"]]
        assert whats[0] == "drawn"
        assert whats[-1] == state
        if state == "trained":
            assert len(draw["saved"]) >= 1
    trained = answer(client, f"{rl}/draws?state=trained")
    assert trained["total"] == sum(state == "trained" for state in expected.values())
    assert client.get(f"{rl}/draws/99999").status_code == 404


def test_evaluations_have_intervals_and_flips(client: TestClient, rl: str):
    listed = answer(client, f"{rl}/evaluation")
    [env] = listed["environments"]
    scores = History(read_metrics(RL.metrics)).evals["reverse-text"]
    assert dict(zip(env["version"], env["value"], strict=True)) == scores
    for value, low, high in zip(env["value"], env["low"], env["high"], strict=True):
        assert low <= value <= high
    first, *_, last = listed["saved"]
    tasks = answer(client, f"{rl}/evaluation/{first}/{last}")["tasks"]
    assert np.mean(tasks["before"]) == pytest.approx(scores[first])
    assert np.mean(tasks["after"]) == pytest.approx(scores[last])
    assert set(tasks["flip"]) <= {"gained", "lost", ""}


def test_runs_are_compared_as_by_the_command(client: TestClient):
    ids = [run_id(client, name) for name in ("rl", "hackable")]
    compared = answer(client, f"/api/compare?run={ids[0]}&run={ids[1]}")
    assert compared["comparison"]["metric"] == "reward/all/mean"
    assert {curve["run"] for curves in compared["curves"]["reward/all/mean"].values() for curve in curves} == set(ids)
    assert client.get(f"/api/compare?run={ids[0]}").status_code == 400


def test_hostile_texts_travel_as_they_are(tmp_path: Path):
    hostile = "<script>alert(1)</script>\u2028\u202e\x1b[31m" + "x" * 100_000
    shutil.copytree(RL.root, tmp_path / "rl")
    sample = Sample([1, 2], [False, True], [0.0, -1.0], [-1, 0], 1)
    sample.set_stream("advantages", [0.0, 0.5])
    messages = [{"role": "assistant", "content": hostile}]
    rollout = Rollout(env=hostile[:40], task_key="t", group_id=hostile[:9], reward=1.0, samples=[sample],
                      messages=messages)  # fmt: skip
    write_rollouts(tmp_path / "rl" / "rollouts", 9, [rollout], [])
    client = browser(tmp_path)
    base = f"/api/runs/{run_id(client, 'rl')}"
    reply = client.get(f"{base}/steps/9/rollouts/0")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["messages"] == messages
    assert answer(client, f"{base}/steps/9")["groups"][0]["id"] == hostile[:9]


def test_events_have_only_what_was_appended(tmp_path: Path):
    shutil.copytree(RL.root, tmp_path / "rl")
    folder = RunFolder(tmp_path / "rl")
    [run] = folder.runs().values()
    events = RunEvents(run, None)
    assert [name for name, _, _ in events()] == ["status"]
    assert events() == []
    MetricsLog(run.dir.metrics, "trainer").log(5, {"loss": 0.25})
    [(name, content, number)] = events()
    assert (name, [record["loss"] for record in content["records"]]) == ("metrics", [0.25])
    assert number == run.dir.metrics.stat().st_size
    shutil.copy(RL.rollouts / "step-00000004.parquet", run.dir.rollouts / "step-00000005.parquet")
    [(name, content, _)] = events()
    assert (name, content["steps"][-1]) == ("files", 5)
    offset = (RECORDED / "rl" / "metrics.jsonl").stat().st_size
    again = RunEvents(run, offset)()
    assert [record["step"] for record in again[0][1]["records"]] == [5]


def test_no_record_is_lost_between_the_answer_and_the_first_event(tmp_path: Path):
    shutil.copytree(RECORDED / "rl", tmp_path / "run")
    run = RunFolder(tmp_path / "run").runs().popitem()[1]
    described = describe_run(run)
    with open(run.dir.metrics, "a") as file:
        file.write('{"step": 9, "time": 1.0, "process": "trainer", "loss": 0.5}\n')
    events = {name: content for name, content, _ in RunEvents(run, described["offset"])()}
    assert [record["step"] for record in events["metrics"]["records"]] == [9]


def test_a_run_that_is_still_empty_can_be_opened(tmp_path: Path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.toml").write_text("max_steps = 4\n")
    client = browser(tmp_path)
    base = f"/api/runs/{run_id(client, 'new')}"
    for path in ("", "/series", "/lanes", "/evaluation"):
        answer(client, base + path)
    assert client.get(f"{base}/draws").status_code == 404


def test_a_run_of_another_kind_has_the_same_pages(client: TestClient):
    base = f"/api/runs/{run_id(client, 'sft')}"
    described = answer(client, base)
    assert described["kind"] == "sft"
    assert "Loss" in [chart["title"] for chart in described["charts"]]
    assert [lane["process"] for lane in answer(client, f"{base}/lanes")["lanes"]] == ["trainer"]


def test_a_long_run_is_sampled_at_a_few_places(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    padding = {f"padding/{number}": 0.5 for number in range(100)}
    lines = [{"step": step, "time": 1.0, "loss": step / 10, **padding} for step in range(1, 1001)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = sample_records(path, ("loss",), 24)
    assert len(records) == 24
    assert [records[0].step, records[-1].step] == [1, 1000]
    assert all(record.f0 == record.step / 10 for record in records)
    assert np.all(np.diff([record.step for record in records]) > 0)


def test_a_damaged_rollout_is_an_error_of_one_answer(tmp_path: Path):
    shutil.copytree(RL.root, tmp_path / "rl")
    (tmp_path / "rl" / "rollouts" / "step-00000002.parquet").write_bytes(b"PAR1 not a table PAR1")
    client = browser(tmp_path)
    base = f"/api/runs/{run_id(client, 'rl')}"
    assert client.get(f"{base}/steps/2").status_code == 400
    assert "step-00000002.parquet" in client.get(f"{base}/steps/2").json()["error"]
    assert client.get(f"{base}/steps/3").status_code == 200


def test_an_export_has_the_answers_of_the_server(tmp_path: Path):
    run = shutil.copytree(RL.root, tmp_path / "rl", ignore=shutil.ignore_patterns("step-0000000[123]*", "checkpoints"))
    export(RunFolder(run), tmp_path / "page")
    mode = (tmp_path / "page" / "static" / "page.js").read_text().partition("\n")[0]
    paths = json.loads(mode[mode.index("[") : mode.rindex("]") + 1])
    client = browser(run)
    names = set()
    for path in paths:
        name = "-".join(path.removeprefix("/api/").split("/"))
        script = (tmp_path / "page" / "data" / f"{name}.js").read_text()
        assert "<" not in script
        head = f'HEADRACE.receive("{path}", '
        assert script.startswith(head)
        content = json.loads(script[len(head) :].rstrip().removesuffix(");"))
        if path.endswith(("/api/runs", "/series", "/steps/4", "/rollouts/0", "/rollouts/0/credit", "/evaluation/0/4")):
            assert content == answer(client, path)
        names.add(name)
    assert len(names) == len(paths) == len(set(paths))
    assert sum(path.endswith("/credit") for path in paths) == 16


def test_an_export_does_not_write_into_a_directory_with_files(tmp_path: Path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(BadInput, match=str(tmp_path)):
        export(RunFolder(RL.root), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
