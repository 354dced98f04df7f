"""Archives at URLs: a real S3 server on loopback, HTTP, and memory; with a proxy in between that
fails as servers and networks do.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tlcache.errors import TransferError, UsageError
from tlcache.store import layout
from tlcache.store.archive import choosing, remote, sending

SERVER = """
import sys, urllib.request
import boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://127.0.0.1:%d" % server.get_host_and_port()[1]
print(url, flush=True)
known = dict(aws_access_key_id="id", aws_secret_access_key="secret", region_name="us-east-1")
for line in sys.stdin:  # each asks for an empty bucket
    urllib.request.urlopen(url + "/moto-api/reset", data=b"")
    boto3.client("s3", endpoint_url=url, **known).create_bucket(Bucket="bucket")
    print("ready", flush=True)
"""


class Proxy(ThreadingHTTPServer):
    """Passes on to a server, but for what `fault` says of a request: `error`, `cut` or None."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = port
        self.fault = lambda method, path, headers: None
        self.faults = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Passing(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        fault = self.server.fault(self.command, self.path, self.headers)
        self.server.faults += fault is not None
        if fault == "error":
            told = b"<Error><Code>InternalError</Code><Message>out of order</Message></Error>"
            self._answer(500, [("Content-Type", "application/xml")], told)
            return
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        behind.request(self.command, self.path, body, dict(self.headers))
        response = behind.getresponse()
        data = response.read()
        kept = ("transfer-encoding", "connection", "content-length", "date", "server")
        headers = [(k, v) for k, v in response.getheaders() if k.lower() not in kept]
        length = response.getheader("Content-Length") if self.command == "HEAD" else None
        self._answer(response.status, headers, data, cut=fault == "cut", length=length)
        behind.close()

    def _answer(self, status, headers, data, *, cut=False, length=None) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def moto() -> Iterator[subprocess.Popen[str]]:
    """An S3 server in a process of its own. It says its URL, and empties itself when asked to."""
    pytest.importorskip("s3fs")
    found = subprocess.run([sys.executable, "-c", "import moto.server"], check=False)
    if found.returncode:
        pytest.skip("moto is not installed here")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def port(moto) -> int:
    return int(moto.stdout.readline().rpartition(":")[2])


@pytest.fixture
def s3(moto, port, monkeypatch) -> Iterator[Proxy]:
    """A proxy before that server, in force for the test's commands, and an empty bucket."""
    moto.stdin.write("empty\n")
    moto.stdin.flush()
    assert moto.stdout.readline() == "ready\n"
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    proxy = Proxy(port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # of those that asked another test's proxy
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    yield proxy
    proxy.shutdown()
    proxy.server_close()
    thread.join()


def is_object(method: str, path: str) -> bool:
    return method == "GET" and path.partition("?")[0].endswith(".zst")


def digest_in(out: str) -> str:
    match = re.search(r"^sha256:[0-9a-f]{64}$", out, re.MULTILINE)
    assert match is not None
    return match[0]


def test_what_goes_to_s3_comes_back(tlcache, s3, source, cache_root, files):
    url = "s3://bucket/fleet/kernels.tar.zst"
    sent = tlcache("export", "-o", url, "--cache-dir", source)
    assert sent.code == 0, sent.err
    taken = tlcache("import", url, "--digest", digest_in(sent.out))
    assert taken.code == 0, taken.err
    assert files(cache_root) == files(source)


def test_the_same_is_there_as_in_a_file(tlcache, s3, source, archive, tmp_path):
    tlcache("export", "-o", "s3://bucket/a.tar.zst", "--cache-dir", source)
    remote.fetch("s3://bucket/a.tar.zst", str(tmp_path / "fetched"))
    assert (tmp_path / "fetched").read_bytes() == archive.read_bytes()


def test_shards_in_a_bucket_are_gathered(tlcache, s3, source, cache_root):
    keys = sorted(path.stem for path in layout.records(source))
    for number in range(2):
        choice = choosing.by_keys(str(source), keys[number::2])
        sending.send(choice, f"s3://bucket/shards/{number}.tar.zst")
    done = tlcache("import", "s3://bucket/shards/*.tar.zst", "--json")
    assert done.code == 0, done.err
    assert [one["archive"] for one in done.json["archives"]] == [
        "s3://bucket/shards/0.tar.zst",
        "s3://bucket/shards/1.tar.zst",
    ]
    assert sorted(path.stem for path in layout.records(cache_root)) == keys
    assert tlcache("verify").code == 0


def test_a_wrong_digest_is_refused_and_nothing_lands(tlcache, s3, source, cache_root):
    tlcache("export", "-o", "s3://bucket/a.tar.zst", "--cache-dir", source)
    done = tlcache("import", "s3://bucket/a.tar.zst", "--digest", "sha256:" + "0" * 64)
    assert done.code == 1
    assert "s3://bucket/a.tar.zst is refused: its digest is sha256:" in done.err
    assert not cache_root.exists()


def test_an_object_that_is_cut_off_is_refused(tlcache, s3, archive, cache_root, tmp_path):
    cut = tmp_path / "cut.tar.zst"
    cut.write_bytes(archive.read_bytes()[:-5000])
    remote.send(str(cut), "s3://bucket/cut.tar.zst")
    done = tlcache("import", "s3://bucket/cut.tar.zst")
    assert done.code == 1
    assert "s3://bucket/cut.tar.zst is refused: it ends in the middle" in done.err
    assert not cache_root.exists()


@pytest.fixture
def large(source, s3, tlcache):
    """An archive in the bucket that is fetched in several ranges."""
    place = next(p for p in layout.entries(source) if p.tilelang == "0.1.15")
    (place.path / "notes.bin").write_bytes(os.urandom(20 * 1024 * 1024))
    sent = tlcache("export", "-o", "s3://bucket/large.tar.zst", "--cache-dir", source)
    assert sent.code == 0, sent.err
    return "s3://bucket/large.tar.zst"


@pytest.mark.parametrize("kind", ["error", "cut"])
def test_a_server_that_fails_in_the_middle_is_said_and_running_again_goes_on(
    tlcache, s3, large, source, cache_root, files, kind
):
    def fault(method, path, headers):
        later = not headers.get("Range", "bytes=0-").startswith("bytes=0-")
        return kind if is_object(method, path) and later else None

    s3.fault = fault
    done = tlcache("import", large)
    assert s3.faults
    assert done.code == 3, done.err
    assert f"{large} cannot be fetched" in done.err
    assert "hint: run this again" in done.err
    assert not cache_root.exists()
    s3.fault = lambda *_: None
    again = tlcache("import", large)
    assert again.code == 0, again.err
    assert files(cache_root) == files(source)


def test_a_server_that_fails_now_and_then_is_asked_again(tlcache, s3, large, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    seen: set[str] = set()

    def fault(method, path, headers):
        asked = headers.get("Range", "")
        first = asked not in seen
        seen.add(asked)
        return "error" if is_object(method, path) and first else None

    s3.fault = fault
    done = tlcache("import", large)
    assert done.code == 0, done.err
    assert s3.faults


def test_an_upload_that_fails_leaves_what_was_there(tlcache, s3, source, archive, tmp_path):
    remote.send(str(archive), "s3://bucket/a.tar.zst")
    kept = tmp_path / "kept"
    remote.fetch("s3://bucket/a.tar.zst", str(kept))
    s3.fault = lambda method, path, headers: "error" if method == "PUT" else None
    key = next(layout.records(source)).stem
    done = tlcache("export", "-o", "s3://bucket/a.tar.zst", "--cache-dir", source)
    assert done.code == 3, (done.err, key)
    assert "s3://bucket/a.tar.zst cannot be written" in done.err
    s3.fault = lambda *_: None
    remote.fetch("s3://bucket/a.tar.zst", str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == kept.read_bytes()


def test_a_bucket_that_is_not_there_is_said(tlcache, s3, source):
    done = tlcache("import", "s3://nobody/a.tar.zst")
    assert done.code in (2, 3), done.err
    assert "s3://nobody/a.tar.zst" in done.err
    assert "Traceback" not in done.err
    none = tlcache("import", "s3://bucket/*.tar.zst")
    assert none.code == 2
    assert "nothing matches s3://bucket/*.tar.zst" in none.err


def test_a_signed_archive_in_a_bucket_is_verified(tlcache, s3, source, cache_root, tmp_path):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen here")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers = tmp_path / "signers"
    signers.write_text(f"builder {key.with_suffix('.pub').read_text()}")
    url = "s3://bucket/signed.tar.zst"
    sent = tlcache("export", "-o", url, "--sign", key, "--cache-dir", source)
    assert sent.code == 0, sent.err
    done = tlcache("import", url, "--verify", signers)
    assert done.code == 0, done.err
    assert f"{url} is signed by builder" in done.err


@pytest.fixture
def served(archive) -> Iterator[str]:
    """The URL of a web server that has the archive."""
    pytest.importorskip("aiohttp")

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, directory=str(archive.parent), **kwargs)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://user:pass@127.0.0.1:{server.server_address[1]}/{archive.name}?token=secret"
        server.shutdown()
        thread.join()


def test_an_archive_comes_over_http_and_its_token_is_not_told(
    tlcache, served, source, cache_root, files
):
    done = tlcache("import", served.replace("user:pass@", ""), "--json")
    assert done.code == 0, done.err
    assert files(cache_root) == files(source)
    assert "secret" not in done.out + done.err
    gone = tlcache("import", served.replace("all.tar.zst", "gone.tar.zst"))
    assert gone.code == 2
    assert "secret" not in gone.err and "pass" not in gone.err


def test_memory_works_in_one_process(source, taken, cache_root, files):
    sending.send(choosing.everything(str(source)), "memory://place/a.tar.zst")
    assert remote.expand("memory://place/*.tar.zst") == ["memory:///place/a.tar.zst"]
    taken("memory://place/a.tar.zst")
    assert files(cache_root) == files(source)


def test_files_are_meant_by_paths_patterns_and_file_urls(archive, taken, tmp_path):
    assert remote.expand(str(tmp_path / "*.zst")) == [str(archive)]
    assert remote.expand(f"file://{archive}") == [str(archive)]
    odd = tmp_path / "odd[1].tar.zst"
    shutil.copy(archive, odd)
    assert remote.expand(str(odd)) == [str(odd)]
    assert taken(f"file://{archive}").published.new["kernel"]
    with pytest.raises(UsageError, match="nothing matches"):
        remote.expand(str(tmp_path / "*.none"))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://key:secret@host/a?x=1", "s3://host/a"),
        ("https://host/a.tar.zst?X-Amz-Signature=ab", "https://host/a.tar.zst"),
        ("/a/b?c@d", "/a/b?c@d"),
        ("memory://a", "memory://a"),
    ],
)
def test_messages_show_no_secrets_of_a_url(url, told):
    assert remote.named(url) == told


def test_a_package_that_is_missing_is_named(python, archive):
    done = python(
        "import sys\n"
        "sys.modules['s3fs'] = None\n"
        "from tlcache.store.archive import remote\n"
        "try:\n    remote.expand('s3://a/*')\n"
        "except Exception as error:\n    print(type(error).__name__, error.hint)\n"
    )
    assert done.out == "TransferError `pip install 'tlcache[s3]'`\n", done.err


def test_a_protocol_that_nobody_knows_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="cannot be used"):
        remote.fetch("nonsense://a/b", str(tmp_path / "x"))


def test_a_url_needs_no_root_to_be_refused(taken, cache_root):
    with pytest.raises((UsageError, TransferError)):
        taken("memory://nothing/here.tar.zst")
    assert not cache_root.exists()


def test_no_local_archive_brings_fsspec(python, archive, cache_root):
    done = python(
        "import sys\nfrom tlcache.store.archive import receiving, sending\n"
        f"receiving.receive({str(cache_root)!r}, [{str(archive)!r}])\n"
        "print('fsspec' in sys.modules)"
    )
    assert done.out == "False\n", done.err
