"""The address that a host advertises to the others, and the check that they reach it."""

from __future__ import annotations

import errno
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from headrace import machine
from headrace.launch.errors import BadRequest

DIAL_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 2.0
ELSEWHERE = "192.0.2.1"
"""An address that belongs to no network (RFC 5737): the route to it is the default route."""
DISCARD_PORT = 9


def advertised_address(interface: str | None = None) -> str:
    """Return the address of this host for hosts that are not known yet.

    The address of `interface`; else the source address of the default route, that of the host name, that of the first
    interface which is not the loopback.
    """
    if interface is not None:
        return interface_address(interface)
    ways: list[Callable[[], str]] = [
        lambda: source_address(ELSEWHERE),
        lambda: socket.gethostbyname(socket.gethostname()),
        *(partial(interface_address, name) for _, name in socket.if_nameindex()),
    ]
    for way in ways:
        with suppress(OSError, BadRequest):  # no default route; an interface without an address
            if not (address := way()).startswith("127."):
                return address
    return "127.0.0.1"


def source_address(peer: str) -> str:
    """Return the address from which this host's packets to a peer come. Raises `OSError` without a route."""
    family, kind, _, _, address = socket.getaddrinfo(peer, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def interface_address(name: str) -> str:
    """Return the IPv4 address of the configured network interface. Raises `BadRequest`."""
    names = ", ".join(sorted(name for _, name in socket.if_nameindex()))
    if sys.platform != "linux":
        raise BadRequest("supported on Linux only", key="launch.interface", value=name, fix="Leave it out.")
    try:
        return machine.interface_address(name)
    except OSError as error:
        fact = "no such interface" if error.errno == errno.ENODEV else "the interface has no IPv4 address"
        fact = f"{fact} on host {socket.gethostname()}"
        raise BadRequest(fact, key="launch.interface", value=name, fix=f"Its interfaces: {names}.") from error


def url_of(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


class CheckPort:
    """A port on all interfaces that answers every connection with this host's nonce."""

    def __init__(self) -> None:
        self.nonce = ""
        self._server = listen_everywhere()
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, name="check port", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            with connection, suppress(OSError):  # the peer has gone
                connection.settimeout(ANSWER_TIMEOUT_S)
                connection.sendall(self.nonce.encode())

    def close(self) -> None:
        with suppress(OSError):  # wakes `accept`
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def listen_everywhere(port: int = 0) -> socket.socket:
    """Return a listening socket on all interfaces, for IPv6 as well where the system has it."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def dial(address: str, port: int, nonce: str, timeout_s: float = DIAL_TIMEOUT_S) -> str:
    """Return why a host's check port cannot be reached; empty if it answers with its nonce."""
    try:
        with socket.create_connection((address, port), timeout_s) as connection:
            answer = b""
            while len(answer) < len(nonce) and (part := connection.recv(256)):
                answer += part
    except TimeoutError:
        return f"no answer within {timeout_s:g} s. Open the port range between the hosts, or set launch.interface"
    except OSError as error:
        return f"{error.strerror or error}. Open the port range between the hosts, or set launch.interface"
    if answer.decode(errors="replace") != nonce:
        return "another host answers at this address. Set launch.interface to the network that the hosts share"
    return ""


def find_free_ports(count: int) -> list[int]:
    """Return ports that no process on this host uses at the moment."""
    probes = [listen_everywhere() for _ in range(count)]
    try:
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
