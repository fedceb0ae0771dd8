"""Where media may come from, and how much of it: one frozen policy per server, one budget per request."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ninfer_format.errors import UsageError
from ninfer_runtime.media.errors import MediaBudgetError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MIB = 1 << 20
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses here are IPv4 addresses in their last 32 bits (RFC 6052)."""


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """What may be fetched.

    roots              folders whose files may be named; none: no local files
    allowed_networks   networks that may be reached although they are not public
    remote             http and https may be used at all
    max_item_bytes, max_total_bytes, max_items   per request
    max_redirects      of one item; every hop is checked like the first
    connect_seconds    for one connection, with TLS
    total_seconds      for one item, name lookup and redirects included
    """

    roots: tuple[Path, ...] = ()
    allowed_networks: tuple[Network, ...] = ()
    remote: bool = True
    max_item_bytes: int = 256 * MIB
    max_total_bytes: int = 512 * MIB
    max_items: int = 16
    max_redirects: int = 3
    connect_seconds: float = 5.0
    total_seconds: float = 60.0

    def __post_init__(self) -> None:
        for root in self.roots:
            if not root.is_dir():
                raise UsageError(f"--media-root {root} is not a folder")

    def may_reach(self, address: Address) -> bool:
        """True for public addresses, and those of ``allowed_networks``."""
        if any(address in network for network in self.allowed_networks):
            return True
        return is_public(address)


def is_public(address: Address) -> bool:
    """True unless the address is private, loopback, link-local, multicast, reserved, or an IPv6 form of such a one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        # Teredo, and the deprecated form of an IPv4 address in the last 32 bits.
        if address.teredo is not None or int(address) >> 32 == 0 or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def read_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Networks as the command line spells them; UsageError for what is none."""
    networks = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise UsageError(f"--media-allow-net {text!r}: {error}") from None
    return tuple(networks)


class MediaBudget:
    """What one request has brought so far."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy
        self.n_items = 0
        self.n_bytes = 0

    def begin_item(self) -> int:
        """One more medium; the most bytes it may have. MediaBudgetError when it is one too many."""
        policy = self._policy
        if self.n_items >= policy.max_items:
            raise MediaBudgetError(f"the request has more than {policy.max_items} media")
        self.n_items += 1
        return min(policy.max_item_bytes, policy.max_total_bytes - self.n_bytes)

    def end_item(self, n_bytes: int) -> None:
        """It has so many bytes."""
        self.n_bytes += n_bytes

    def too_large(self, what: str) -> MediaBudgetError:
        """The error for an item beyond what ``begin_item`` said."""
        policy = self._policy
        limit = f"{policy.max_item_bytes} bytes for one medium, {policy.max_total_bytes} for all of a request"
        return MediaBudgetError(f"{what} is too large; the limits are {limit}")
