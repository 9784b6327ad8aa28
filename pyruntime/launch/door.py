# SPDX-License-Identifier: Apache-2.0
"""The door of a process that starts ranks: the server that these call, if they know its key."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import socket
import struct

from farandole.start.server import Server, listen_at
from farandole.start.session import SECRET_BYTES

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


class Door(Server):
    """The starting process's side, a context manager."""

    def __init__(self, ranks: int, here: bool) -> None:
        """`here`: all ranks are on this host; else others connect by TCP. All must know the key."""
        secret = secrets.token_bytes(SECRET_BYTES)
        name = f"farandole-{secrets.token_hex(8)}"  # abstract: there is no file, and no path
        listeners = [listen_at(f"\0{name}")]
        self.key = secret.hex()  # what the ranks must know
        self.address = f"@{name}"  # as reach() takes it
        if not here:
            listeners.append(socket.create_server(("", 0)))
            places = ",".join([self.address, *_numbers(), *_names()])
            self.address = f"{places}:{listeners[1].getsockname()[1]}"
        super().__init__("door", listeners, ranks, secret)


def _numbers() -> list[str]:
    """The IPv4 addresses of this host's interfaces, those of the host itself left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has none
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return [number for number in found if not number.startswith("127.")]


def _names() -> list[str]:
    """The name of this host, for ranks that reach none of the addresses; none if it has only one
    that means another host elsewhere."""
    name = socket.getfqdn()
    return [] if name.split(".")[0] == "localhost" else [name]
