"""Files and overrides become one tree."""

from pathlib import Path

import pytest

from headrace.config.base import ConfigError
from headrace.config.files import parse_yaml
from headrace.runfile.reading import load, parse_overrides
from headrace.runfile.run import RunConfig
from tests.config.run_files import MINIMAL, algo, load_text
from tests.refusals import refused


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
    with refused(ConfigError, key=f"--orchestrator.train.env.{index.replace('-', '_')}.ratio"):
        load_text(tmp_path, MINIMAL, f"--orchestrator.train.env.{index}.ratio", "2")


def test_an_override_below_a_value_is_refused(tmp_path: Path):
    with refused(ConfigError, key="--max_steps.lr"):
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


@pytest.mark.parametrize("argument", ["--max_steps", "--trainer.optim.lr", "--model.name"])
def test_a_key_whose_value_was_forgotten_says_so(tmp_path: Path, argument: str):
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, MINIMAL, argument)
    assert (error.value.key, error.value.value) == (argument, True)
    assert "without a value" in (error.value.fix or "")


def test_true_and_false_in_a_file_are_no_numbers(tmp_path: Path):
    text = MINIMAL.replace("max_steps = 10", "max_steps = true\nseed = false")
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, text)
    assert [(error.key, error.value) for error in error.value.problems] == [("max_steps", True), ("seed", False)]


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
    with pytest.raises(ConfigError) as error:
        parse_overrides(arguments)
    assert error.value.key in arguments


def test_an_override_given_twice_is_refused():
    with refused(ConfigError, key="--max_steps"):
        parse_overrides(["--max-steps", "3", "--seed", "1", "--max_steps=4"])


def test_text_that_happens_to_hold_a_line_break_is_not_cut_short():
    assert parse_overrides(["--x", "1\ny = 2"]) == [(["x"], "1\ny = 2")]


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        load(RunConfig, [tmp_path / "absent.toml"])
    assert error.value.file == tmp_path / "absent.toml"


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("run.toml", b"max_steps = \n", 1),
        ("run.toml", b"a = 1\nb = 1\na = 2\n", 3),
        ("run.toml", b"seed = 1\nmax_steps = = 3\n", 2),
        ("run.toml", "max_steps = 3\n".encode("utf-16"), None),
        ("run.toml", "seed = 1\n# prüfung\n".encode("latin-1"), 2),
        ("run.toml", b'{"max_steps": 3}\n', None),
        ("run.json", b'{"max_steps": 3}\n', None),
        ("run.yml", b"a: 1\na: 2\n", 2),
        ("run.yml", b"a: 1\nb: {c: 1, 'c': 2}\n", 2),
        ("run.yml", b"a: &a {b: 1, b: 2}\nc:\n  <<: *a\n", 1),
        ("run.yml", b"a: &a {b: 1}\nc:\n  <<: *a\n  b: 2\n  b: 3\n", 5),
        ("run.yaml", b"seed: 1\na: [1\n", 3),
        ("run.yaml", b"a: b: c\n", 1),
        ("run.yaml", b"a: \x07\n", None),
        ("run.yaml", b"- a\n", None),
        ("run.yaml", "a: 1\n".encode("utf-16"), None),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(tmp_path: Path, name: str, content: bytes, line: int | None):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load(RunConfig, [path])
    assert (error.value.file, error.value.line) == (path, line)


def test_a_byte_order_mark_is_skipped(tmp_path: Path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load(RunConfig, [tmp_path / "run.toml"])[0].max_steps == 10


def test_a_directory_is_refused_with_the_file_in_it(tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        load(RunConfig, [tmp_path])
    assert error.value.file == tmp_path
    (tmp_path / "config.toml").write_text(MINIMAL)
    with pytest.raises(ConfigError) as error:
        load(RunConfig, [tmp_path])
    assert str(tmp_path / "config.toml") in (error.value.fix or "")


def test_an_override_without_its_dashes_is_recognized():
    with pytest.raises(ConfigError) as error:
        load(RunConfig, [Path("max_steps=3")])
    assert "--max_steps 3" in (error.value.fix or "")


def test_a_single_table_where_a_list_of_tables_belongs_says_how_to_write_it(tmp_path: Path):
    with refused(ConfigError, key="orchestrator.train.env") as error:
        load_text(tmp_path, MINIMAL.replace("[[orchestrator.train.env]]", "[orchestrator.train.env]"))
    assert "[[orchestrator.train.env]]" in (error.value.fix or "")


def test_a_wrong_value_is_blamed_on_the_source_that_it_came_from(tmp_path: Path):
    base = write(tmp_path, "base.toml", MINIMAL + "[trainer.optim]\nlr = 1e-4\n")
    more = write(tmp_path, "more.toml", "seq_len = 1\n[trainer.optim]\nweight_decay = -1\n")
    with pytest.raises(ConfigError) as error:
        load(RunConfig, [base, more], ["--trainer.optim.lr", "-1", "--max_stepz", "3"])
    problems = {(error.file, error.key) for error in error.value.problems}
    assert problems == {
        (more, "seq_len"),
        (more, "trainer.optim.weight_decay"),
        (None, "--trainer.optim.lr"),
        (None, "--max_stepz"),
    }


def test_a_missing_key_is_missed_in_all_files(tmp_path: Path):
    base = write(tmp_path, "base.toml", MINIMAL.replace("max_steps = 10", ""))
    with pytest.raises(ConfigError) as error:
        load(RunConfig, [base])
    assert error.value.file == str(base)


def test_null_takes_back_what_an_earlier_source_set(tmp_path: Path):
    base = write(tmp_path, "base.toml", MINIMAL + "[trainer.optim]\nlr = 1e-4\n[trainer.lora]\nr = 4\n[wandb]\n")
    toml = write(tmp_path, "more.toml", 'wandb = "null"\ntrainer.optim.lr = "null"\n')
    yaml = write(tmp_path, "more.yaml", "wandb: null\ntrainer: {optim: {lr: null}}\n")
    for more in (toml, yaml):
        config, _ = load(RunConfig, [base, more], ["--trainer.lora", "null"])
        assert (config.wandb, config.trainer.lora) == (None, None)
        assert config.trainer.optim.lr == load(RunConfig, [base], ["--trainer.optim.lr=null"])[0].trainer.optim.lr
    config, _ = load(RunConfig, [base], ["--trainer.lora", "null", "--trainer.lora.r", "null"])
    assert config.trainer.lora is None


def test_null_in_arguments_of_own_code_is_a_value(tmp_path: Path):
    text = "orchestrator: {train: {env: [{id: a, args: {limit: null}}]}}\n"
    more = write(tmp_path, "more.yaml", text)
    config, _ = load(RunConfig, [write(tmp_path, "base.toml", MINIMAL), more])
    assert config.orchestrator.train.env[0].args == {"limit": None}


def test_a_later_type_replaces_the_keys_of_the_earlier_one_alone(tmp_path: Path):
    text = MINIMAL + '[trainer.optim]\ntype = "sgd"\nlr = 1e-4\nmomentum = 0.5\n[trainer.loss]\nkl_tau = 0.1\n'
    config, _ = load_text(tmp_path, text, "--trainer.optim.type", "adamw", "--trainer.loss.type", "cispo")
    assert (config.trainer.optim.type, config.trainer.optim.lr) == ("adamw", 1e-4)
    assert config.trainer.loss.type == "cispo"


def test_a_misspelt_key_is_refused_though_a_later_source_changes_the_type(tmp_path: Path):
    with refused(ConfigError, key="trainer.loss.kl_tua"):
        load_text(tmp_path, MINIMAL + "[trainer.loss]\nkl_tua = 0.1\n", "--trainer.loss.type", "cispo")


def test_a_key_of_another_type_beside_the_later_type_is_refused(tmp_path: Path):
    with refused(ConfigError, key="--trainer.loss.kl_tau"):
        load_text(tmp_path, MINIMAL, "--trainer.loss.type", "cispo", "--trainer.loss.kl_tau", "0.1")


def test_a_later_choice_of_the_model_replaces_the_earlier_one(tmp_path: Path):
    base = write(tmp_path, "base.toml", MINIMAL.replace('model.name = "models/tiny"', 'model.sft = "sft.toml"'))
    assert load(RunConfig, [base])[0].model.sft == tmp_path / "sft.toml"
    config, _ = load(RunConfig, [base], ["--model.name", "models/other"])
    assert (config.model.name, config.model.sft, config.trainer.model.name) == ("models/other", None, "models/other")
    more = write(tmp_path, "more.toml", '[model]\ninit = "tiny"\n')
    config, _ = load(RunConfig, [base, more])
    assert (config.model.init, config.model.sft) == ("tiny", None)


def test_two_choices_in_one_source_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, MINIMAL, "--model.sft", "sft.toml", "--model.init", "tiny")
    assert (error.value.key or "").startswith("--model")


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
