"""`tlcache warm` on one of several hosts: shards that gathered are one warm, and what is said of
them.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tlcache.store import layout

KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "2"}
BROKEN = """
import tilelang


@tilelang.jit(out_idx=[1])
def broken(N: int):
    raise ValueError(f"no kernel of {N}")
"""


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    """Nothing of who started these tests tells of a shard."""
    for name in ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)


def keys_of(root) -> list[str]:
    return sorted(path.stem for path in layout.records(root))


def test_shards_of_two_hosts_gathered_are_one_unsharded_warm(warmed, tlcache, resolved, cache_root):
    one, two = keys_of(warmed / "one"), keys_of(warmed / "two")
    assert len(one) == len(two) == 2
    done = tlcache("import", f"{warmed}/shards/*.tar.zst")
    assert done.code == 0, done.err
    assert "imported 4 kernels, 4 records" in done.out
    assert "lacking" not in done.err
    assert keys_of(cache_root) == sorted([*one, *two]) == keys_of(warmed / "whole")
    names = [place.key for place in layout.entries(cache_root)]
    assert names == [place.key for place in layout.entries(warmed / "whole")]
    assert tlcache("verify").code == 0
    assert resolved(cache_root) == {"restored": 4, "disk": 0, "compiled": 0}
    assert tlcache("warm", "--shapes", warmed / "whole.json", "--check").code == 0


def test_a_gathering_says_which_shards_it_lacks(warmed, tlcache):
    (first,) = warmed.glob("shards/shard-1-of-2-*.tar.zst")
    done = tlcache("import", first)
    assert done.code == 0
    deal = first.name.removesuffix(".tar.zst").rpartition("-")[2]
    assert f"lacking: shard 2 of 2 (deal {deal})" in done.err
    (lack,) = tlcache("import", first, "--json").json["lacking"]
    assert lack["deal"].startswith(deal)
    assert (lack["shards"], lack["absent"], lack["short"]) == (2, [2], {})


def test_all_schedulers_and_hands_deal_alike(warmed, tlcache, cache_root):
    ways = {
        "kubernetes": ("auto", KUBERNETES),
        "torchrun": ("auto", {"RANK": "1", "WORLD_SIZE": "2"}),
        "hand": ("2/2", {}),
    }
    told = []
    for shard, env in ways.values():
        some = ("--shapes", warmed / "whole.json", "--shard", shard, "--dry-run", "--json")
        done = tlcache("warm", *some, env=env)
        assert "shard 2 of 2: 2 of 4 kernels" in done.err
        told.append((done.json["shard"], [each["action_key"] for each in done.json["kernels"]]))
    assert told[0] == told[1] == told[2]
    assert sorted(told[0][1]) == keys_of(warmed / "two")
    assert not cache_root.exists()


def test_a_shard_that_is_there_is_published_again_as_the_same_file(warmed, tlcache, tmp_path):
    some = ("--shapes", warmed / "whole.json", "--cache-dir", warmed / "one", "--shard", "1/2")
    done = tlcache("warm", *some, "--publish", f"file://{tmp_path}/again/", "--json")
    assert done.code == 0, done.err
    (first,) = warmed.glob("shards/shard-1-of-2-*.tar.zst")
    assert (tmp_path / "again" / first.name).read_bytes() == first.read_bytes()
    told = done.json["published"]
    assert told["archive"] == f"{tmp_path}/again/{first.name}"
    assert (told["kernels"], told["bytes"]) == (2, first.stat().st_size)
    assert told["digest"].startswith("sha256:")
    assert tlcache("import", first, "--digest", told["digest"]).code == 0


def test_a_root_that_holds_more_publishes_its_shard_alone(warmed, tlcache, tmp_path):
    some = ("--shapes", warmed / "whole.json", "--cache-dir", warmed / "whole", "--shard", "2/2")
    assert tlcache("warm", *some, "--publish", "out").code == 0
    gathered = tmp_path / "gathered"
    assert tlcache("import", "out/*.tar.zst", "--cache-dir", gathered).code == 0
    assert keys_of(gathered) == keys_of(warmed / "two")


def test_more_hosts_than_kernels_leave_some_with_none(warmed, tlcache, tmp_path):
    some = ("--shapes", warmed / "whole.json", "--cache-dir", warmed / "whole", "--publish", "out")
    for number in range(1, 7):
        done = tlcache("warm", *some, "--shard", f"{number}/6")
        assert done.code == 0, done.err
    gathered = tmp_path / "gathered"
    done = tlcache("import", "out/*.tar.zst", "--cache-dir", gathered)
    assert "lacking" not in done.err
    assert keys_of(gathered) == keys_of(warmed / "whole")


def test_a_warm_of_all_is_published_as_its_only_shard(warmed, tlcache, tmp_path):
    some = ("--shapes", warmed / "whole.json", "--cache-dir", warmed / "whole")
    done = tlcache("warm", *some, "--publish", "out")
    assert done.code == 0, done.err
    assert "shard" not in done.err
    assert [path.name[:13] for path in (tmp_path / "out").iterdir()] == ["shard-1-of-1-"]


def test_what_fails_to_compile_is_lacking_where_shards_are_gathered(
    warmed, tlcache, tmp_path, cache_root
):
    (tmp_path / "broken.py").write_text(BROKEN)
    document = json.loads((warmed / "some.json").read_text())
    document["workloads"].append({"kernel": "broken:broken", "args": {"N": 7}})
    (tmp_path / "shapes.json").write_text(json.dumps(document))
    tlcache("import", f"{warmed}/shards/*.tar.zst")
    done = tlcache("warm", "--shapes", "shapes.json", "--publish", "out")
    assert done.code == 1
    assert "published 2 kernels" in done.out
    gathered = tlcache("import", "out/*.tar.zst", "--cache-dir", "gathered")
    assert gathered.code == 0
    assert "lacking: 1 kernel of shard 1 of 1 (deal " in gathered.err


def test_what_was_not_reached_is_not_published(tlcache, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    workload = {"kernel": "broken:broken", "args": {"N": [1, 2, 3]}}
    document = {"version": 1, "targets": ["cpu"], "workloads": [workload]}
    (tmp_path / "shapes.json").write_text(json.dumps(document))
    some = ("--shapes", "shapes.json", "--publish", "out", "--fail-fast", "--jobs", "1")
    done = tlcache("warm", *some)
    assert done.code == 1
    assert "not published: 2 kernels not reached" in done.err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("source", ["archive", "root", "pattern"])
def test_what_an_earlier_warm_took_balances_the_shards(warmed, tlcache, tmp_path, source):
    archive = tmp_path / "earlier.tar.zst"
    assert tlcache("export", "-o", archive, "--cache-dir", warmed / "whole").code == 0
    told = {"archive": archive, "root": warmed / "whole", "pattern": f"{tmp_path}/*.zst"}
    some = ("--shapes", warmed / "whole.json", "--dry-run", "--balance", told[source])
    shards = [tlcache("warm", *some, "--shard", f"{number}/3", "--json") for number in (1, 2, 3)]
    assert [done.code for done in shards] == [0, 0, 0]
    assert len({done.json["shard"]["deal"] for done in shards}) == 1
    keys = [each["action_key"] for done in shards for each in done.json["kernels"]]
    assert sorted(keys) == keys_of(warmed / "whole")
    assert " of compiling" in shards[0].err


class _Refusing(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_error(507)

    do_PUT = do_POST

    def log_message(self, *_):
        pass


def test_a_shard_that_cannot_be_sent_is_told_after_what_was_compiled(warmed, tlcache):
    pytest.importorskip("aiohttp")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/shards"
    some = ("--shapes", warmed / "whole.json", "--cache-dir", warmed / "one", "--shard", "1/2")
    done = tlcache("warm", *some, "--publish", url)
    server.shutdown()
    server.server_close()
    assert done.code == 3
    assert "2 already there" in done.out
    assert f"error: {url}/shard-1-of-2-" in done.err
    assert "cannot be written" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--shard", "0/2"], 2, "there is no shard 0 of 2"),
        (["--shard", "two"], 2, "'two' is no shard"),
        (["--shard", "auto"], 2, "`--shard auto` finds no scheduler"),
        (["--balance", "x"], 2, "it goes with `--shard`"),
        (["--shard", "1/2", "--balance", "none.tar.zst"], 2, "none.tar.zst cannot be read"),
        (["--shard", "1/2", "--balance", "."], 2, ". tells of no kernel what its compile took"),
        (["--shard", "1/2", "--balance", "cache"], 2, "names the root that is warmed"),
        (["--publish", "x", "--shard", "1/2", "--balance", "x/*"], 2, "where `--publish` puts"),
        (["--sign", "key"], 2, "it goes with `--publish`"),
        (["--publish", "x", "--sign", "key"], 2, "the key key cannot be read"),
        (["--publish", "x", "--check"], 2, "`--check` compiles nothing"),
        (["--publish", "x", "--dry-run"], 2, "`--dry-run` compiles nothing"),
        (["--publish", "x.tar.zst"], 2, "is no place for several archives"),
        (["--publish", "s3://bucket/x?y=z"], 2, "s3://bucket/x has a query"),
        (["--publish", "none://x"], 2, "none://x/ cannot be used"),
        (["--publish", "/dev/null/x"], 2, "/dev/null/x/ cannot be made: not a directory"),
    ],
)
def test_what_could_not_end_well_is_said_before_anything_is_compiled(
    warmed, tlcache, cache_root, arguments, code, said
):
    cache_root.mkdir(mode=0o755)
    done = tlcache("warm", "--shapes", warmed / "whole.json", *arguments)
    assert (done.code, said in done.err) == (code, True), done.err
    assert "Traceback" not in done.err
    assert list(cache_root.iterdir()) == []


def test_two_schedulers_that_differ_are_not_believed(warmed, tlcache):
    env = {**KUBERNETES, "RANK": "0", "WORLD_SIZE": "2"}
    done = tlcache("warm", "--shapes", warmed / "whole.json", "--shard", "auto", env=env)
    assert done.code == 2
    assert "is told two things" in done.err
    assert "(Kubernetes) and RANK=0 WORLD_SIZE=2 (torchrun)" in done.err


def test_a_signed_shard_is_one_that_can_be_verified(warmed, tlcache, run, tmp_path):
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key", "-C", "host@example.com"])
    kind, key, _ = (tmp_path / "key.pub").read_text().split()
    (tmp_path / "signers").write_text(f"host@example.com {kind} {key}\n")
    some = ("--shapes", warmed / "whole.json", "--cache-dir", warmed / "one", "--shard", "1/2")
    done = tlcache("warm", *some, "--publish", "out", "--sign", "key")
    assert done.code == 0, done.err
    taken = tlcache("import", "out/*.tar.zst", "--verify", "signers")
    assert taken.code == 0, taken.err
    assert "is signed by host@example.com" in taken.err


def test_what_is_missing_of_a_shard_is_asked_for_by_its_options(warmed, tlcache):
    done = tlcache("warm", "--shapes", warmed / "whole.json", "--shard", "1/2", "--check")
    assert done.code == 1
    assert "2 of 2 kernels are missing" in done.out
    assert "whole.json --shard 1/2` compiles them" in done.err
