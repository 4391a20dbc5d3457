"""Certificates for tests of TLS, made by `openssl`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

NAME = "triton.test"
"""Of the server that has them, beside this machine's addresses."""
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificates:
    """Files in one folder: an authority's, a server's and a client's that it signed, one of somebody else."""

    folder: Path

    def __getattr__(self, name: str) -> str:
        """`ca`, `server_key`, ...: the file's path."""
        return str(self.folder / f"{name}.pem")


def make_certificates(folder: Path) -> Certificates:
    made = Certificates(folder)
    for name in ("ca", "stranger"):
        _openssl(
            "req", "-x509", *_EC, "-subj", f"/CN=foretoken test {name}", "-days", "2", "-keyout", f"{name}_key.pem", "-out", f"{name}.pem", at=folder
        )
    for name, use in (("server", f"DNS:{NAME},DNS:localhost,IP:127.0.0.1"), ("client", "DNS:client.test")):
        (folder / f"{name}.ext").write_text(f"subjectAltName={use}\n")
        _openssl("req", *_EC, "-subj", f"/CN={name}", "-keyout", f"{name}_key.pem", "-out", f"{name}.csr", at=folder)
        signed = ("-CA", "ca.pem", "-CAkey", "ca_key.pem", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
        _openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem", at=folder)
    return made


def _openssl(*words: str, at: Path) -> None:
    done = subprocess.run(["openssl", *words], cwd=at, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
