"""Learning curves over the checkpoints of runs."""

from pathlib import Path

from headrace.tools.evaluate.candidates import Candidate
from headrace.tools.evaluate.report import curve_chart, curve_charts, write_report
from headrace.tools.evaluate.results import Estimate, ModelResult
from tests.tools.evaluate.test_charts import check_legible


def result(run: str, step: int | None, accuracy: float, **measures: float) -> ModelResult:
    around = {"avg@1": accuracy, "pass@1": accuracy, **measures}
    estimates = {name: Estimate(value, value - 0.1, value + 0.1) for name, value in around.items()}
    return ModelResult(f"{run}-{step}", run, 10, 1, estimates, run=run, step=step)


def test_every_run_with_several_steps_is_a_line_in_the_order_of_its_steps():
    slow = [result("sweep/slow", step, 0.1 * step) for step in (4, 2, 3)]
    fast = [result("sweep/fast", step, 0.2 * step, thinking_tokens=50.0 * step) for step in (2, 4)]
    pictures = curve_charts("sums", [*slow, *fast, result("sweep/single", 4, 0.9), result("", None, 0.5)])
    assert list(pictures) == ["accuracy", "thinking"]
    accuracy, thinking = pictures.values()
    assert ">slow 0.400</text>" in accuracy and ">fast 0.800</text>" in accuracy
    assert ">fast 200.0</text>" in thinking and "tokens of thinking, mean" in thinking
    assert "slow" not in thinking and "single" not in accuracy
    assert accuracy.count("<circle") == 5
    check_legible(accuracy)


def test_the_line_and_its_band_are_where_the_numbers_are():
    points = [(0, Estimate(0.0, 0.0, 0.5)), (10, Estimate(1.0, 0.5, 1.0))]
    svg = curve_chart("sums", "accuracy", {"run": points})
    band = 'd="M60.0,{half}L580.0,{top}L580.0,{half}L60.0,{bottom}h0Z"'
    right = 720 - 20 - 24 - 7.2 * len("run 1.000")
    top, bottom = 44 + 24, 44 + 24 + 320
    written = band.format(half=f"{(top + bottom) / 2:.1f}", top=f"{top:.1f}", bottom=f"{bottom:.1f}")
    assert written.replace("580.0", f"{right:.1f}") in svg


def test_many_runs_of_a_sweep_are_all_named():
    results = [result(f"sweep/run-{n}", step, 0.5 + n / 1000) for n in range(30) for step in (1, 2)]
    svg = curve_charts("sums", results)["accuracy"]
    assert all(f">run-{n} " in svg for n in range(30))
    check_legible(svg)


def test_words_are_shown_where_tokens_are_not_known():
    results = [result("run", step, 0.5, thinking_words=9.0 + step, format=1.0) for step in (1, 2)]
    pictures = curve_charts("sums", results)
    assert list(pictures) == ["accuracy", "thinking", "format"]
    assert "words of thinking, mean" in pictures["thinking"]


def test_they_are_among_the_files_of_a_report_where_a_run_has_several_steps(tmp_path: Path):
    one = write_report(tmp_path / "one", "sums", {}, [result("run", 2, 0.5)])
    two = write_report(tmp_path / "two", "sums", {}, [result("run", step, 0.5, format=1.0) for step in (2, 4)])
    assert not [path for path in one if path.name.startswith("curve-")]
    assert {path.name for path in two if path.name.startswith("curve-")} == {"curve-accuracy.svg", "curve-format.svg"}


def test_a_checkpoint_says_which_step_it_is_of():
    assert Candidate("x", "checkpoint", "run/checkpoints/permanent/step-00000040", Path("run")).step == 40
    assert Candidate("x", "model", "models/step-40").step is None
