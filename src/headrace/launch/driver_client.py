"""Requests to the driver of a run, from the environment variables of a node, or from `driver.json` of the run."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from headrace.errors import Failure
from headrace.launch.errors import BadRequest
from headrace.launch.node_messages import DriverAddress, Refusal
from headrace.rollout.digest import is_whole
from headrace.transport.announcements import DRIVER_VAR, KEY_VAR
from headrace.transport.digests import MISMATCH
from headrace.transport.run_dir import RunDir

Answer = TypeVar("Answer", bound=msgspec.Struct)


class NoDriver(Failure):
    """The driver cannot be reached at the moment."""


class RefusedByDriver(Failure):
    """The driver has answered with an error. `again`: the request may succeed later."""

    def __init__(self, message: str, again: bool, status: int) -> None:
        super().__init__(message)
        self.again, self.status = again, status


def find_driver(run: Path) -> DriverAddress:
    """Return the driver of a run. Raises `NoDriver` if there is none at the moment."""
    if url := os.environ.get(DRIVER_VAR):
        if not (key := os.environ.get(KEY_VAR)):
            raise BadRequest("not set", key=KEY_VAR, fix=f"Set it to the key of the driver in {DRIVER_VAR}.")
        return DriverAddress(url, key)
    path = RunDir(run).driver
    try:
        if is_whole(content := path.read_bytes()) is False:
            raise BadRequest(MISMATCH, file=path, fix="Start the run again.")
        return msgspec.json.decode(content, type=DriverAddress)
    except FileNotFoundError:
        raise NoDriver(f"no {path}: no launcher runs this run, or this host does not share its directory") from None
    except PermissionError:
        raise BadRequest("the run belongs to another user", file=path, fix="Start this as the same user.") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"damaged: {error}", file=path, fix="Start the run again.") from error


class DriverClient:
    """One connection to a driver, which is kept open."""

    def __init__(self, driver: DriverAddress) -> None:
        self.driver = driver
        headers = {"Authorization": f"Bearer {driver.key}"}
        self._http = httpx.Client(
            base_url=driver.url, headers=headers, trust_env=False
        )  # proxies lead out of a cluster

    def get(self, path: str, kind: type[Answer], timeout_s: float) -> Answer:
        return self._request("GET", path, None, kind, timeout_s)

    def post(self, path: str, body: msgspec.Struct, kind: type[Answer], timeout_s: float) -> Answer:
        return self._request("POST", path, msgspec.json.encode(body), kind, timeout_s)

    def _request(self, method: str, path: str, content: bytes | None, kind: type[Answer], timeout_s: float) -> Answer:
        """Raises `NoDriver`, `RefusedByDriver`."""
        try:
            answer = self._http.request(method, path, content=content, timeout=timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoDriver(self._explain(error)) from error
        try:
            if answer.status_code == httpx.codes.OK:
                return msgspec.json.decode(answer.content, type=kind)
            refusal = msgspec.json.decode(answer.content, type=Refusal)
        except msgspec.DecodeError as error:
            raise NoDriver(f"{self.driver.url}: another program answers at the driver's address") from error
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            fix = f"Take it from {KEY_VAR} or driver.json of the running launcher."
            message = f"{self.driver.url}: the driver refuses the key of host {socket.gethostname()}. {fix}"
            raise RefusedByDriver(message, again=False, status=answer.status_code)
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise NoDriver(f"{self.driver.url}: {refusal.message}")
        raise RefusedByDriver(refusal.message, refusal.again, answer.status_code)

    def _explain(self, error: Exception) -> str:
        url, name, here = self.driver.url, self.driver.host, socket.gethostname()
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            fix = "Add it to the name service or /etc/hosts, or set launch.interface so that an address is used"
            return f"{url}: the name {name} does not resolve on host {here}. {fix}"
        why = str(error) or "timeout"
        return f"{url}: host {here} cannot reach the driver ({why}). Open its port between the hosts"

    def close(self) -> None:
        self._http.close()
