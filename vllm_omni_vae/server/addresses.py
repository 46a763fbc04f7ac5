# SPDX-License-Identifier: Apache-2.0
"""Which addresses of the network a server may be sent to by a client: those that anyone can reach."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network

IPAddress = IPv4Address | IPv6Address

PORTS = frozenset({80, 443})
# All of IPv6 that belongs to single hosts of the internet; the rest is local, for groups, or not given out.
_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: IPAddress, port: int) -> bool:
    """Whether ``address`` is a host of the internet, and ``port`` one of the web's.

    False for what is private, shared, loopback, link-local, multicast, reserved or unspecified. An IPv6 address that
    stands for one of IPv4 (mapped, 6to4, NAT64) counts as that one.
    """
    if isinstance(address, IPv6Address):
        inner = _inner(address)
        if inner is not None:
            address = inner
        elif address not in _UNICAST:
            return False
    return port in PORTS and address.is_global and not address.is_multicast


def _inner(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
