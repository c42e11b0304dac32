"""A browser of the view: a client that has exchanged the token for the cookie."""

from pathlib import Path

from starlette.testclient import TestClient

from headrace.tools.view.runs import RunFolder
from headrace.tools.view.server import make_app

TOKEN = "the-token"
PORT = 8123
RECORDED = Path(__file__).parents[2] / "data" / "recorded-runs"


def stranger(path: Path, host: str = f"127.0.0.1:{PORT}") -> TestClient:
    return TestClient(
        make_app(RunFolder(path), TOKEN, PORT), base_url=f"http://127.0.0.1:{PORT}", headers={"host": host}
    )


def browser(path: Path = RECORDED) -> TestClient:
    client = stranger(path)
    assert client.get("/", params={"token": TOKEN}).status_code == 200
    return client


def run_id(client: TestClient, name: str) -> str:
    return next(str(run["id"]) for run in client.get("/api/runs").json()["runs"] if run["name"] == name)
