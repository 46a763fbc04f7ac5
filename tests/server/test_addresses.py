# SPDX-License-Identifier: Apache-2.0
"""Where a server may be sent to fetch something."""

from ipaddress import ip_address

import pytest

from vllm_omni_vae.server.addresses import is_public

PUBLIC = ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:0808:0808::1"]
INSIDE = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.2.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:224.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::1",
    "100::1",
    "2001:0:7f00:1::",
    "2001:db8::1",
    "2002:7f00:0001::1",
    "2002:a9fe:a9fe::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_hosts_of_the_internet(address: str) -> None:
    assert is_public(ip_address(address), 80)
    assert is_public(ip_address(address), 443)


@pytest.mark.parametrize("address", INSIDE)
def test_everything_else_is_inside(address: str) -> None:
    assert not is_public(ip_address(address), 443)


@pytest.mark.parametrize("port", [0, 22, 81, 8000, 8443])
def test_only_ports_of_the_web(port: int) -> None:
    assert not is_public(ip_address("8.8.8.8"), port)
