import socket

import pytest

from headrace.launch.addresses import (
    CheckPort,
    advertised_address,
    dial,
    find_free_ports,
    interface_address,
    source_address,
    url_of,
)
from tests.refusals import refused

linux = pytest.mark.skipif("lo" not in {name for _, name in socket.if_nameindex()}, reason="the loopback is not `lo`")


def test_the_source_address_follows_the_route_to_the_peer():
    assert source_address("127.0.0.1") == "127.0.0.1"


@linux
def test_the_address_of_an_interface_is_advertised():
    assert interface_address("lo") == advertised_address("lo") == "127.0.0.1"


@linux
def test_an_unknown_interface_is_refused_with_those_that_exist():
    with refused(key="launch.interface", value="ib7") as error:
        interface_address("ib7")
    assert "lo" in str(error.value.fix) and socket.gethostname() in error.value.fact


def test_a_check_port_is_reached_by_its_nonce():
    port = CheckPort()
    port.nonce = "mine"
    assert dial("127.0.0.1", port.port, "mine") == ""
    assert "another host" in dial("127.0.0.1", port.port, "else")
    port.close()
    assert "refused" in dial("127.0.0.1", port.port, "mine")


def test_free_ports_are_different():
    assert len(set(find_free_ports(8))) == 8


def test_a_url_brackets_an_ipv6_address():
    assert (url_of("10.0.0.1", 80), url_of("fd00::1", 80)) == ("http://10.0.0.1:80", "http://[fd00::1]:80")
