"""Where archives are: files, and URLs through fsspec.

Invariant: fsspec is imported for a URL only. An archive is fetched whole before it is looked at,
and appears where it is sent whole or not at all. Messages show no query and no user of a URL: they
may be secrets.
"""

from __future__ import annotations

import glob
import os
import re
from typing import Any

from tlcache.errors import TlcacheError, TransferError, UsageError

__all__ = ["below", "expand", "fetch", "is_url", "known", "named", "send", "small"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CHUNK = 8 * 1024 * 1024
_MOST_SIGNATURE = 64 * 1024
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}


def is_url(text: str) -> bool:
    """Whether something is to be fetched; a path, also as `file://`, is not."""
    match = _URL.match(text)
    return match is not None and match[1].lower() != "file"


def named(text: str) -> str:
    """A file or URL as it may be shown."""
    if not is_url(text):
        return text
    scheme, _, rest = text.partition("://")
    place, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"


def below(place: str, name: str) -> str:
    """A file in a directory, or the URL of one below a URL.

    Raises:
        UsageError: The place is a file's name, or no place for files.
    """
    if is_url(place) and "?" in place:
        raise UsageError(
            f"{named(place)} has a query, so nothing can be put below it",
            hint="name a place like s3://bucket/shards",
        )
    if place.endswith(".tar.zst") or not place:
        raise UsageError(
            f"{named(place)!r} is no place for several archives",
            hint="name a directory, or a URL like s3://bucket/shards; the files name themselves",
        )
    place = place if is_url(place) else place.removeprefix("file://")
    return f"{place.rstrip('/')}/{name}"


def known(url: str) -> None:
    """Check that somebody here speaks a URL's protocol; nothing is asked of its server.

    Raises:
        TransferError: A package is missing, or the file system refuses.
        UsageError: The protocol is unknown.
    """
    _system(url)


def expand(text: str) -> list[str]:
    """The archives that a file, a URL or a pattern such as `s3://bucket/*.tar.zst` means.

    Raises:
        UsageError: A pattern matches nothing.
        TransferError: Its server cannot be asked.
    """
    if not is_url(text):
        path = text.removeprefix("file://")
        if os.path.exists(path) or not glob.has_magic(path):
            return [path]
        found = sorted(glob.glob(path))
    elif "*" not in text:
        return [text]
    else:
        system, path = _system(text)
        try:
            system.invalidate_cache()
            found = [system.unstrip_protocol(each) for each in sorted(system.glob(path))]
        except Exception as error:
            raise _failed(text, "cannot be listed", error) from error
    if not found:
        raise UsageError(f"nothing matches {named(text)}")
    return found


def fetch(url: str, path: str) -> None:
    """Copy what is at a URL into a new file.

    Raises:
        UsageError: There is nothing.
        TransferError: It cannot be fetched whole.
        OSError: The file cannot be written.
    """
    system, there = _system(url)
    with open(path, "xb") as target:
        try:
            with system.open(there, "rb", block_size=_CHUNK, cache_type="readahead") as source:
                expected = getattr(source, "size", None)
                for data in iter(lambda: source.read(_CHUNK), b""):
                    _written(target, data)
        except _Local as error:
            raise error.cause from error
        except Exception as error:
            raise _failed(url, "cannot be fetched", error) from error
        if expected is not None and target.tell() != expected:
            raise TransferError(
                f"{named(url)} has {expected:,} bytes, and {target.tell():,} came",
                hint="run this again",
            )


class _Local(Exception):
    """The file at hand cannot be written, which is no fault of who sends."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _written(target: Any, data: bytes) -> None:
    try:
        target.write(data)
    except OSError as error:
        raise _Local(error) from error


def small(url: str) -> bytes:
    """The bytes of a small file or URL, such as a signature.

    Raises:
        UsageError: There is nothing, or far more than a signature.
        TransferError: It cannot be fetched.
    """
    try:
        if is_url(url):
            system, path = _system(url)
            with system.open(path, "rb") as file:
                data = bytes(file.read(_MOST_SIGNATURE + 1))
        else:
            with open(url, "rb") as file:
                data = file.read(_MOST_SIGNATURE + 1)
    except Exception as error:
        raise _failed(url, "cannot be read", error) from error
    if len(data) > _MOST_SIGNATURE:
        raise UsageError(f"{named(url)} has more than {_MOST_SIGNATURE:,} bytes: no signature has")
    return data


def send(path: str, url: str) -> None:
    """Put a file where it belongs; what is there is replaced.

    Args:
        path: The file. It is moved to a path, and copied to a URL.
        url: A path in the same directory, or a URL.

    Raises:
        TransferError: It cannot be sent.
        OSError: The path cannot be written.
    """
    if not is_url(url):
        os.replace(path, url)
        return
    system, there = _system(url)
    size = os.path.getsize(path)
    try:
        system.put_file(path, there)
        system.invalidate_cache()
        arrived = system.info(there)["size"]
    except Exception as error:
        raise _failed(url, "cannot be written", error) from error
    if arrived != size:
        raise TransferError(
            f"{arrived:,} of {size:,} bytes arrived at {named(url)}", hint="run this again"
        )


def _system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        TransferError: A package is missing, or the file system refuses.
        UsageError: The protocol is unknown.
    """
    import fsspec

    scheme = url.partition("://")[0].lower()
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        remedy = f"`pip install 'tlcache[{extra}]'`" if extra else f"fsspec says: {error}"
        raise TransferError(
            f"{scheme}:// needs a package that is not installed", hint=remedy
        ) from error
    except ValueError as error:
        raise UsageError(f"{named(url)} cannot be used: {error}") from error
    except Exception as error:
        raise _failed(url, "cannot be opened", error) from error
    return system, str(path)


def _failed(url: str, what: str, error: Exception) -> TlcacheError:
    if isinstance(error, TlcacheError):
        return error
    if isinstance(error, FileNotFoundError):
        return UsageError(f"there is nothing at {named(url)}")
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if (secret := url.partition("?")[2]) and secret in reason:
        reason = reason.replace(secret, "…")
    if isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError)):
        return TransferError(
            f"{named(url)} {what}: {reason}", hint="check its name, and the credentials for it"
        )
    return TransferError(
        f"{named(url)} {what}: {reason}", hint="run this again; what is there already stays"
    )
