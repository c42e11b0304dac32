"""Files and overrides become one tree."""

from pathlib import Path

import pytest

from headrace.config.base import ConfigError, load, parse_overrides
from headrace.config.run import RunConfig
from headrace.config.yaml_text import parse_yaml
from tests.config.run_files import MINIMAL, algo, load_text


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_later_files_win_and_overrides_win_over_files(tmp_path: Path):
    base = write(tmp_path, "base.toml", MINIMAL + "[trainer.optim]\nlr = 1e-4\nweight_decay = 0.1\n")
    more = write(tmp_path, "more.toml", "seq_len = 128\n[trainer.optim]\nlr = 2e-4\n")
    config, _ = load(RunConfig, [base, more], ["--max_steps", "20"])
    assert (config.max_steps, config.seq_len) == (20, 128)
    assert (config.trainer.optim.lr, config.trainer.optim.weight_decay) == (2e-4, 0.1)
    config, _ = load(RunConfig, [more, base])
    assert (config.seq_len, config.trainer.optim.lr) == (64, 1e-4)


def test_a_list_in_a_later_file_replaces_the_earlier_one(tmp_path: Path):
    base = write(tmp_path, "base.toml", MINIMAL)
    more = write(tmp_path, "more.toml", '[[orchestrator.train.env]]\nid = "other"\n')
    config, _ = load(RunConfig, [base, more])
    assert [env.id for env in config.orchestrator.train.env] == ["other"]


def test_an_override_steps_into_a_list_by_index(tmp_path: Path):
    text = MINIMAL + '[[orchestrator.train.env]]\nid = "second"\n'
    overrides = ["--orchestrator.train.env.1.ratio", "0.5", "--orchestrator.train.env.0.ratio=2"]
    config, _ = load_text(tmp_path, text, *overrides)
    assert [env.ratio for env in config.orchestrator.train.env] == [2, 0.5]


@pytest.mark.parametrize("index", ["1", "-1", "first"])
def test_an_override_outside_a_list_names_the_list_and_its_length(tmp_path: Path, index: str):
    with pytest.raises(ConfigError, match=r"orchestrator\.train\.env is a list of 1"):
        load_text(tmp_path, MINIMAL, f"--orchestrator.train.env.{index}.ratio", "2")


def test_an_override_below_a_value_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="max_steps is a value, not a section"):
        load_text(tmp_path, MINIMAL, "--max_steps.lr", "2")


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        (["--trainer.optim.lr", "1e-5"], "trainer.optim.lr", 1e-5),
        (["--trainer.optim.lr=1e-5"], "trainer.optim.lr", 1e-5),
        (["--seed", "-3"], "seed", -3),
        (["--x", "-1.5e-3"], "x", -1.5e-3),
        (["--x", "true"], "x", True),
        (["--x", "false"], "x", False),
        (["--x"], "x", True),
        (["--x=false"], "x", False),
        (["--model.name", "Qwen/Qwen3-0.6B"], "model.name", "Qwen/Qwen3-0.6B"),
        (["--model.name", '"17"'], "model.name", "17"),
        (["--model.name", "'true'"], "model.name", "true"),
        (["--model.name=a=b"], "model.name", "a=b"),
        (["--x="], "x", ""),
        (["--x", "[1, 2]"], "x", [1, 2]),
        (["--x", "{a = 1}"], "x", {"a": 1}),
        (["--max-steps", "5"], "max_steps", 5),
        (["--x", "two words"], "x", "two words"),
        (["--x", "outputs/run#3"], "x", "outputs/run#3"),
    ],
)
def test_override_values_are_toml_where_they_are_toml_and_text_otherwise(
    arguments: list[str], path: str, value: object
):
    assert parse_overrides(arguments) == [(path.split("."), value)]
    assert type(parse_overrides(arguments)[0][1]) is type(value)


def test_a_flag_before_another_key_is_true():
    assert parse_overrides(["--a.b", "--c", "1"]) == [(["a", "b"], True), (["c"], 1)]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--max_steps", "a whole number is expected, not true"),
        ("--trainer.optim.lr", "a number is expected, not true"),
        ("--model.name", "Input should be a valid string (got true"),
    ],
)
def test_a_key_whose_value_was_forgotten_is_told_what_that_means(tmp_path: Path, argument: str, expected: str):
    with pytest.raises(ConfigError) as refused:
        load_text(tmp_path, MINIMAL, argument)
    assert f"{argument.removeprefix('--')}: {expected}, which {argument} without a value means" in str(refused.value)


def test_true_and_false_in_a_file_are_no_numbers(tmp_path: Path):
    text = MINIMAL.replace("max_steps = 10", "max_steps = true\nseed = false")
    with pytest.raises(ConfigError, match=r"max_steps: a whole number is expected, not true.*\n.*seed: .* not false"):
        load_text(tmp_path, text)


@pytest.mark.parametrize(
    ("arguments", "values"), [(["--trainer.compile", "--model.trust_remote_code"], (True, True)), ([], ("auto", False))]
)
def test_a_flag_alone_is_true_for_keys_that_take_it(
    tmp_path: Path, arguments: list[str], values: tuple[object, object]
):
    config, _ = load_text(tmp_path, MINIMAL, *arguments)
    assert (config.trainer.compile, config.model.trust_remote_code) == values


@pytest.mark.parametrize("arguments", [["lr", "1"], ["--x", "1", "2"], ["-x", "1"], ["--"]])
def test_what_is_no_override_is_refused_by_name(arguments: list[str]):
    with pytest.raises(ConfigError, match=r"overrides are written --section\.key value"):
        parse_overrides(arguments)


def test_text_that_happens_to_hold_a_line_break_is_not_cut_short():
    assert parse_overrides(["--x", "1\ny = 2"]) == [(["x"], "1\ny = 2")]


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file"):
        load(RunConfig, [tmp_path / "absent.toml"])


@pytest.mark.parametrize("content", [b"max_steps = \n", b"a = 1\na = 2\n", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml: not valid TOML"):
        load(RunConfig, [path])


def test_invalid_toml_says_in_which_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="line 2"):
        load_text(tmp_path, "seed = 1\nmax_steps = = 3\n")


def test_text_beyond_ascii_is_read(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_bytes((MINIMAL + '[[orchestrator.eval.env]]\nid = "prüfung"\n').encode())
    config, _ = load(RunConfig, [path])
    assert config.orchestrator.eval.env[0].id == "prüfung"


def test_yaml_says_the_same_as_toml(tmp_path: Path):
    (tmp_path / "run.toml").write_text(MINIMAL)
    (tmp_path / "more.yaml").write_text(
        "orchestrator:\n  algo:\n    type: rlcsd\n    delta: 2e-2\n    teacher:\n      name: t\n      base_url: http://t/v1\n"
        "trainer:\n  optim: {lr: 1e-4}\n"
    )
    config, _ = load(RunConfig, [tmp_path / "run.toml", tmp_path / "more.yaml"])
    assert config.orchestrator.algo == algo(
        {"type": "rlcsd", "delta": 0.02, "teacher": {"name": "t", "base_url": "http://t/v1"}}
    )
    assert config.trainer.optim.lr == 1e-4


def test_yaml_may_merge_what_an_anchor_names_and_give_its_keys_again():
    text = """
base: &base {lr: 1, seed: 2}
more: &more
  <<: *base
  lr: 3
most:
  <<: *more
  lr: 4
  seed: 5
both:
  <<: [*more, {seed: 6, steps: 7}]
deep:
  inner: &inner {<<: *base, lr: 3}
early: {<<: *inner}
"""
    base, more, most = {"lr": 1, "seed": 2}, {"lr": 3, "seed": 2}, {"lr": 4, "seed": 5}
    both = {"lr": 3, "seed": 2, "steps": 7}
    rest = {"deep": {"inner": more}, "early": more}
    assert parse_yaml(text) == {"base": base, "more": more, "most": most, "both": both, **rest}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "not valid YAML: 'a' is given twice"),
        ("a: 1\nb: {c: 1, 'c': 2}\n", r"not valid YAML: 'c' is given twice\s+in .*line 2"),
        ("a: &a {b: 1, b: 2}\nc:\n  <<: *a\n", "not valid YAML: 'b' is given twice"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n  b: 2\n  b: 3\n", "not valid YAML: 'b' is given twice"),
        ("a: [1\n", "not valid YAML"),
        ("- a\n", "a run file is a table of keys, not list"),
    ],
)
def test_a_file_that_is_no_yaml_table_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "run.yml").write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.yml: {message}"):
        load(RunConfig, [tmp_path / "run.yml"])
