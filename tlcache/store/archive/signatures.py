"""Signatures of archives, by `ssh-keygen -Y`: detached, in the namespace `tlcache`.

    ssh-keygen -Y verify -f SIGNERS -I NAME -n tlcache -s FILE.sig < FILE     the same by hand

Invariant: no cryptography of our own; a signature holds only if ssh-keygen says so for a signer
whom the allowed-signers file names, and whose key is not revoked.
"""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING

from tlcache.errors import ArchiveError, EnvironmentFault, UsageError

if TYPE_CHECKING:
    import subprocess

__all__ = ["NAMESPACE", "SUFFIX", "sign", "verify"]

NAMESPACE = "tlcache"
SUFFIX = ".sig"
_SIGNERS = "a line of it is like `builder@example.com ssh-ed25519 AAAA…`; see ssh-keygen(1)"


def sign(file: IO[bytes], key: str) -> bytes:
    """Sign what a file holds.

    Args:
        file: A file, read from where it stands.
        key: A private key, or a public one whose private half an agent has.

    Raises:
        UsageError: The key cannot be used.
        EnvironmentFault: There is no ssh-keygen.
    """
    _readable(key, "the key")
    done = _run(["-Y", "sign", "-f", key, "-n", NAMESPACE], file)
    if done.returncode or not done.stdout:
        raise UsageError(f"the key {key} does not sign: {_said(done)}")
    return done.stdout


def verify(file: IO[bytes], signature: str, signers: str, revoked: str | None = None) -> str:
    """Check a signature of what a file holds.

    Args:
        file: A file, read from where it stands.
        signature: The signature's file.
        signers: An allowed-signers file.
        revoked: A key revocation list, or a file of public keys.

    Returns:
        The signer's name in that file.

    Raises:
        ArchiveError: It does not hold; why not.
        UsageError: One of the files is not there.
        EnvironmentFault: There is no ssh-keygen.
    """
    _readable(signers, "the allowed-signers file", _SIGNERS)
    if revoked is not None:
        _readable(revoked, "the list of revoked keys")
    found = _run(["-Y", "find-principals", "-f", signers, "-s", signature], None)
    names = found.stdout.decode("utf-8", "replace").splitlines()
    if found.returncode or not names:
        raise ArchiveError(
            f"it is signed by nobody whom {signers} names",
            hint="`ssh-keygen -Y check-novalidate -n tlcache -s FILE.sig < FILE` tells the key",
        )
    extra = ["-r", revoked] if revoked is not None else []
    command = ["-Y", "verify", "-f", signers, "-I", names[0], "-n", NAMESPACE, "-s", signature]
    done = _run([*command, *extra], file)
    if done.returncode:
        raise ArchiveError(f"its signature by {names[0]} does not hold: {_said(done)}")
    return names[0]


def _run(arguments: list[str], file: IO[bytes] | None) -> subprocess.CompletedProcess[bytes]:
    import subprocess  # few archives are signed

    try:
        return subprocess.run(
            ["ssh-keygen", *arguments],
            stdin=file if file is not None else subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise EnvironmentFault(
            "signatures are made and checked by ssh-keygen, which is not installed",
            hint="`apt-get install openssh-client`",
        ) from error


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    text = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
    return text[0].rstrip("\r").lower() if text else f"exit status {done.returncode}"


def _readable(path: str, what: str, hint: str | None = None) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{what} {path} cannot be read: {reason}", hint=hint) from error
