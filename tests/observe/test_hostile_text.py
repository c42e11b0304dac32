"""Text that others wrote (names, exceptions, completions) cannot control a terminal, forge a line or break a page."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import BadInput
from headrace.observe.console import SafeConsole
from headrace.observe.diagnosis import Finding
from headrace.observe.metrics import History, MetricsLog
from headrace.observe.status import ObservedStatus
from headrace.observe.terminal import make_view
from headrace.rollout.types import Rollout, RolloutError
from headrace.safe_text import escape_control, escape_line, escape_markdown, escape_xml
from headrace.tools.sweep.report import write_report
from headrace.transport.rollout_files import write_rollouts
from tests.observe.runs import write_run
from tests.tools.sweep.sweeps import write_sweep

FORGED = "12:00:00 ERROR trainer: all is lost"
HIDDEN = "\x1b]0;\x00\x07\r\x7f\x9b31m\u202e\u2066\u200b\ufeff\u2028\U000e0041"
HOSTILE = f"evil{HIDDEN}[red]<b>|&`\n{FORGED}"
NAME = f"evil{HIDDEN}[red]<b>"


VISIBLE = "\n\t\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2"
"""Characters of the checked categories that take space: the last ones are signs of Arabic and Syriac."""


def check_characters(text: str) -> None:
    hidden = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in VISIBLE}
    assert hidden == set()


def check(text: str) -> None:
    """No character that controls, hides or reorders, and no line that passes as one of ours."""
    check_characters(text)
    assert FORGED not in text.split("\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, 漢字, é, 🙂\n\tindented", "plain, 漢字, é, 🙂\n\tindented"),
        ("\x1b[31m\x00\r", r"\x1b[31m\x00\x0d"),
        ("\x7f\x9b", r"\u007f\u009b"),
        ("\u202eabc\u2069\u200b\ufeff", r"\u202eabc\u2069\u200b\ufeff"),
        ("\udc80 \U000e0041", r"\udc80 \udb40\udc41"),
        ("\ufffe\uffff", r"\ufffe\uffff"),
    ],
)
def test_what_controls_a_terminal_is_shown_as_an_escape(text: str, shown: str):
    assert escape_control(text) == shown


def test_every_character_gives_valid_xml_and_one_line_of_markdown():
    everything = "".join(map(chr, (*range(0x3000), *range(0xD7F0, 0xE010), *range(0xFDC0, 0x10000), 0xE0001)))
    ElementTree.fromstring(f"<a b='{escape_xml(everything)}'>{escape_xml(everything)}</a>")

    check(escape_control(everything))
    assert len(escape_line(everything).splitlines()) == 1
    assert escape_markdown("a|b\n<i>[x](y)") == r"a\|b\\n\<i>\[x](y)"


def test_an_encoded_json_text_stays_valid():
    assert json.loads(escape_control(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """A run whose directory, environment, metrics, rollouts and heartbeat carry such text."""
    keys = {"orchestrator.train.env": [{"id": "reverse-text", "name": NAME}], "model.name": NAME}
    root = write_run(tmp_path / "run\x1b[31m\u202e", [0.1, 0.5, 0.9], keys=keys)
    log = MetricsLog(root / "metrics.jsonl", "orchestrator")
    for version, score in ((0, 0.1), (3, 0.9)):
        log.log(version, {f"eval/{NAME}/avg@1": score, f"eval/other{HIDDEN}/avg@1": score, "eval/third/errors": 0.5})
    log.log(3, {"progress/rollouts": 3, f"reward/{NAME}/mean": 0.4, f"progress/dropped/{NAME}": 3})
    lost = [(Rollout(env=NAME, error=RolloutError(f"bad{HIDDEN}", HOSTILE)), "bad")]
    write_rollouts(root / "rollouts", 3, [], lost)
    (root / "heartbeat.json").write_text(json.dumps({"state": "failed", "problem": HOSTILE}))
    return root


def check_files(folder: Path) -> set[str]:
    """Check every page and chart of a folder; return their suffixes."""
    pages = [path for path in folder.iterdir() if path.suffix in (".md", ".html", ".svg")]
    for path in pages:
        check(path.read_text())
        if path.suffix == ".svg":
            ElementTree.parse(path)
        if path.suffix == ".html":
            assert "<b>" not in path.read_text()
    return {path.suffix for path in pages}


def test_a_summary_shows_and_writes_it_escaped(hostile_run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["summary", str(hostile_run)]) == 0
    printed = capsys.readouterr().out
    check(printed)
    assert r"evil\x1b]0;" in printed and "all is lost" in printed
    assert check_files(hostile_run) == {".md", ".svg"}
    assert main(["summary", str(hostile_run), "--json"]) == 0
    output = capsys.readouterr().out
    check(output)
    assert NAME in [entry["name"] for entry in json.loads(output)["environments"]]


def test_a_comparison_shows_and_writes_it_escaped(
    hostile_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = write_run(tmp_path / f"other{HIDDEN}".replace("\x00", ""), [0.2, 0.3, 0.4])
    pages = tmp_path / "pages"
    assert main(["compare", str(hostile_run), str(other), "--output", str(pages)]) == 0
    check(capsys.readouterr().out)
    assert check_files(pages) == {".md", ".svg"}


def test_a_sweep_reports_it_escaped(tmp_path: Path):
    record = write_sweep(tmp_path / f"sweep{HIDDEN}".replace("\x00", ""), {(0.1, 0): 0.2, (0.1, 1): 0.4, (0.2, 0): 0.8})
    directory = tmp_path / f"sweep{HIDDEN}".replace("\x00", "")
    record.planned[0].outcome, record.planned[0].values = "failed", {f"key{HIDDEN}": HOSTILE}
    log = directory / record.planned[0].name / "logs" / "trainer.log"
    log.parent.mkdir()
    log.write_text(HOSTILE)
    write_report(directory, record, [])
    assert check_files(directory) == {".md", ".html", ".svg"}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_views_of_a_run_show_it_escaped_and_without_markup(is_terminal: bool):
    screen = io.StringIO()
    view = make_view(NAME, 5, SafeConsole(file=screen, width=200, force_terminal=is_terminal, color_system=None))
    status = ObservedStatus(NAME, 1, 0.0, HOSTILE, waiting_for=HOSTILE, problem=HOSTILE, gauges={NAME: HOSTILE})
    view.say(f"orchestrator: {HOSTILE}")
    view.show(History(), {NAME: status}, [Finding("kind", "problem", NAME, HOSTILE, HOSTILE)])
    view.close(History(), {NAME: status})
    shown = screen.getvalue()
    assert r"evil\x1b]0;" in shown and "[red]<b>" in shown  # a markup would have been removed
    if not is_terminal:  # rich writes cursor movements of its own
        check(shown)
    assert not set("\x00\x07\x9b\u202e\u200b") & set(shown)
    assert "\x1b]0;" not in shown and f"\n{FORGED}" not in shown


def test_messages_about_hostile_arguments_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = f"evil{HIDDEN}\n{FORGED}".replace("\x00", "")
    assert main(["summary", str(tmp_path / name)]) == 2
    check(capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["summary", "run", name])
    check(capsys.readouterr().err.replace("\n12:00:00", ""))  # argparse's own line, which quotes the argument
    check(str(BadInput("no such file", file=tmp_path / name, key="RUN", value=tmp_path / name)))


LOGGING = """
import logging, sys
from headrace.cli import main as cli
from headrace.observe.status import setup_logging
hostile = sys.argv[1].encode().decode("unicode_escape")
def run(arguments):
    setup_logging()
    logging.getLogger("a").error("%s", hostile)
    try:
        raise RuntimeError(hostile)
    except RuntimeError:
        logging.getLogger("a").exception("failed")
    raise RuntimeError(hostile)
cli.run_command = run
sys.exit(cli.main(["summary", "run"]))
"""


def test_log_records_and_tracebacks_of_a_process_are_escaped_and_cannot_forge_a_record(tmp_path: Path):
    words = HOSTILE.encode("unicode_escape").decode()
    done = subprocess.run([sys.executable, "-c", LOGGING, words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    check(done.stderr)
    assert done.stderr.count(r"evil\x1b]0;") == 3
    records = [line for line in done.stderr.splitlines() if line[:1] != " "]
    assert len(records) == 3  # two records and the traceback that ended the process


ENVIRONMENT = """
from headrace.environments.base import Environment
from headrace.rollout.types import Rollout

HOSTILE = {hostile!r}

class Hostile(Environment):
    def tasks(self):
        return [{{"word": HOSTILE}}]

    async def run(self, task, context):
        print(HOSTILE)
        reply = await context.chat([{{"role": "user", "content": HOSTILE}}])
        if len(reply.text) % 2:
            raise RuntimeError(HOSTILE)
        scores = {{"rewards": {{HOSTILE: len(set(reply.text)) / 100}}, "metrics": {{HOSTILE: 2.0}}}}
        return [Rollout(messages=[reply.message], turns=[reply.turn], **scores)]
"""


def test_a_probe_shows_prompts_rewards_and_exceptions_of_an_environment_escaped(tmp_path: Path):
    file = tmp_path / "hostile_words.py"
    file.write_text(ENVIRONMENT.format(hostile=HOSTILE))
    command = [sys.executable, "-m", "headrace", "probe", f"{file}:Hostile", "--tasks", "1", "--examples", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "nothing to fix" not in done.stdout and r"\x1b]0;" in done.stdout, done.stdout + done.stderr
    check(done.stdout)
    check_characters(done.stderr)  # what it prints itself, which may be any line
