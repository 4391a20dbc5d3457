"""A second host: a network namespace of this machine, and the cable between the two, which can be cut."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class OtherHost:
    """Where namespaces are refused: another loopback address, whose cable cannot be cut."""

    own: str = "127.0.0.1"
    """Address at which the other host reaches this one."""
    address: str = "127.0.0.2"
    prefix: tuple[str, ...] = ()
    """What a command begins with to run there."""
    cable: str = ""
    devices: tuple[str, str] = ("lo", "lo")
    """Of the network between the two: here, and there."""

    def cut(self) -> None:
        _ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        _ip("link", "set", self.cable, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def other_host() -> Iterator[OtherHost]:
    """A namespace, or where this process may not make one a loopback address."""
    number = os.getpid()
    name, near, far = f"ft{number}", f"ftn{number}", f"ftf{number}"
    net = f"10.213.{number % 250}"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        yield OtherHost()
        return
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", far)
        _ip("link", "set", far, "netns", name)
        _ip("addr", "add", f"{net}.1/24", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", name, "addr", "add", f"{net}.2/24", "dev", far)
        for device in (far, "lo"):
            _ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError):
        _remove(name, near)
        yield OtherHost()
        return
    known = {key: os.environ.get(key) for key in ("no_proxy", "NO_PROXY")}
    os.environ.update({key: f"{value},{net}.1,{net}.2" if value else f"localhost,127.0.0.1,{net}.1,{net}.2" for key, value in known.items()})
    try:
        yield OtherHost(f"{net}.1", f"{net}.2", ("ip", "netns", "exec", name), near, (near, far))
    finally:
        for key, value in known.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
        _remove(name, near)


def _remove(name: str, device: str) -> None:
    for words in (("netns", "del", name), ("link", "del", device)):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            _ip(*words)
