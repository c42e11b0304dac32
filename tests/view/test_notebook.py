"""The tutorial docs/tutorials/first-run.ipynb, executed top to bottom by a real kernel.

With HEADRACE_UPDATE_SNAPSHOTS set, the outputs are written to the page, which the site shows.
"""

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.view, pytest.mark.timeout(900)]

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "first-run.ipynb"


def outputs_of(page: Any) -> list[Any]:
    return [output for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]


def count_plots(page: Any) -> int:
    return sum("image/svg+xml" in output.get("data", {}) for output in outputs_of(page))


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after its execution by the interpreter of the tests, in an empty folder; any error raises."""
    nbformat = pytest.importorskip("nbformat", reason="nbclient is in .venv-view: run `make test-view`")
    from nbclient import NotebookClient

    page = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(page, timeout=600, coalesce_streams=True, resources={"metadata": {"path": folder}})
    client.execute()
    for cell in page.cells:
        cell.metadata.pop("execution", None)  # times
    if "HEADRACE_UPDATE_SNAPSHOTS" in os.environ:
        page.metadata = {"kernelspec": page.metadata.kernelspec, "language_info": {"name": "python"}}
        nbformat.write(page, NOTEBOOK)
    return page


def test_it_trains_a_model_that_improves_and_shows_plots_and_tables(executed: Any):
    assert count_plots(executed) == 3
    printed = "".join(output.text for output in outputs_of(executed) if output.output_type == "stream")
    held_out = [float(line.split()[-1]) for line in printed.splitlines() if "held-out reward" in line]
    assert len(held_out) == 4 and held_out[-1] > held_out[0] + 0.1
    shown = [output.get("data", {}).get("text/plain") for output in outputs_of(executed)]
    assert shown.count("[]") == 1  # the problems of the audit


def test_the_page_has_its_outputs_and_no_path_of_a_machine(executed: Any):
    import nbformat

    page = nbformat.read(NOTEBOOK, as_version=4)
    kinds = [[output.output_type for output in cell.outputs] for cell in page.cells if cell.cell_type == "code"]
    assert kinds == [[o.output_type for o in cell.outputs] for cell in executed.cells if cell.cell_type == "code"]
    assert count_plots(page) == count_plots(executed)
    assert str(Path.home()) not in NOTEBOOK.read_text() and "/tmp/" not in NOTEBOOK.read_text()
