"""Signatures by the real `ssh-keygen`: who may sign, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tlcache.errors import ArchiveError, EnvironmentFault, UsageError
from tlcache.store.archive import choosing, sending
from tlcache.store.archive.receiving import Verification

if shutil.which("ssh-keygen") is None:
    pytest.skip("there is no ssh-keygen here", allow_module_level=True)


@pytest.fixture
def key(tmp_path):
    """Make a key of some name; the path of its private half."""

    def key(name: str) -> Path:
        path = tmp_path / name
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)]
        subprocess.run(command, check=True)
        return path

    return key


@pytest.fixture
def builder(key):
    return key("builder")


@pytest.fixture
def signers(tmp_path, builder):
    """An allowed-signers file that names the builder, for archives alone."""
    path = tmp_path / "signers"
    public = builder.with_suffix(".pub").read_text()
    path.write_text(f'builder@example.com namespaces="tlcache" {public}')
    return path


@pytest.fixture
def signed(source, tmp_path, builder):
    path = tmp_path / "signed.tar.zst"
    sending.send(choosing.everything(str(source)), str(path), key=str(builder))
    return path


@pytest.fixture
def refused(taken, cache_root):
    """What is said of an archive that is not signed as it should be."""

    def refused(path: Path, *, signers: Path, revoked: Path | None = None) -> str:
        wanted = Verification(signers=str(signers), revoked=str(revoked) if revoked else None)
        with pytest.raises((ArchiveError, UsageError)) as told:
            taken(path, verification=wanted)
        assert not cache_root.exists()
        return told.value.message

    return refused


def test_a_signed_archive_is_taken_and_its_signer_is_told(taken, signed, signers):
    imported = taken(signed, verification=Verification(signers=str(signers)))
    assert imported.archives[0].signer == "builder@example.com"
    assert imported.published.new["kernel"]


def test_the_signature_can_be_checked_by_hand(signed, signers):
    command = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "builder@example.com"]
    with signed.open("rb") as file:
        subprocess.run([*command, "-n", "tlcache", "-s", f"{signed}.sig"], stdin=file, check=True)


def test_a_wrong_signer_is_refused(refused, source, tmp_path, signers, key):
    path = tmp_path / "other.tar.zst"
    sending.send(choosing.everything(str(source)), str(path), key=str(key("mallory")))
    assert f"signed by nobody whom {signers} names" in refused(path, signers=signers)


def test_a_signer_who_signs_for_another_purpose_is_refused(refused, signed, signers, builder):
    public = builder.with_suffix(".pub").read_text()
    signers.write_text(f'builder@example.com namespaces="git" {public}')
    refused(signed, signers=signers)


def test_a_signature_for_another_purpose_is_refused(refused, signed, signers, builder):
    with signed.open("rb") as file:
        command = ["ssh-keygen", "-Y", "sign", "-f", builder, "-n", "git"]
        done = subprocess.run(command, stdin=file, capture_output=True, check=True)
    Path(f"{signed}.sig").write_bytes(done.stdout)
    assert "does not hold" in refused(signed, signers=signers)


def test_a_revoked_signer_is_refused(refused, signed, signers, builder, tmp_path):
    revoked = tmp_path / "revoked"
    revoked.write_text(builder.with_suffix(".pub").read_text())
    told = refused(signed, signers=signers, revoked=revoked)
    assert "signature by builder@example.com does not hold" in told
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", revoked, f"{builder}.pub"], check=True)
    assert "does not hold" in refused(signed, signers=signers, revoked=revoked)


def test_another_archive_than_was_signed_is_refused(refused, signed, signers):
    data = bytearray(signed.read_bytes())
    data[len(data) // 2] ^= 1
    signed.write_bytes(data)
    assert "does not hold" in refused(signed, signers=signers)


def test_an_archive_without_a_signature_is_refused(refused, archive, signers):
    assert f"nothing at {archive}.sig" in refused(archive, signers=signers)


def test_a_signature_that_is_none_is_refused(refused, signed, signers):
    Path(f"{signed}.sig").write_text("none")
    refused(signed, signers=signers)


def test_a_signature_that_has_no_end_is_refused(refused, signed, signers):
    Path(f"{signed}.sig").write_bytes(bytes(2**20))
    assert "more than 65,536 bytes" in refused(signed, signers=signers)


def test_files_that_are_not_there_are_wrong_usage(refused, signed, signers, tmp_path):
    assert "allowed-signers file" in refused(signed, signers=tmp_path / "none")
    told = refused(signed, signers=signers, revoked=tmp_path / "none")
    assert "list of revoked keys" in told


def test_a_key_that_cannot_sign_leaves_no_archive(source, tmp_path):
    (tmp_path / "key").write_text("no key")
    path = tmp_path / "a.tar.zst"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="does not sign"):
        sending.send(choosing.everything(str(source)), str(path), key=str(tmp_path / "key"))
    assert sorted(tmp_path.iterdir()) == before


def test_without_ssh_keygen_its_package_is_named(taken, signed, signers, monkeypatch, cache_root):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentFault) as told:
        taken(signed, verification=Verification(signers=str(signers)))
    assert told.value.hint == "`apt-get install openssh-client`"
    assert not cache_root.exists()
