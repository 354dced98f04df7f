"""What a root takes of the disk, held to what `du` says."""

from __future__ import annotations

import os
import shutil
import subprocess

from tlcache.store import disk_usage, record
from tlcache.store.select import Filter


def du(*paths):
    done = subprocess.run(
        ["du", "-s", "--block-size=1", *map(str, paths)], capture_output=True, text=True, check=True
    )
    return sum(int(line.split("\t")[0]) for line in done.stdout.splitlines())


def totals(told):
    return {measured.total() for measured in told.values()}


def test_the_sum_is_what_du_says_by_whatever_it_is_split(mixed):
    (total,) = totals(disk_usage.measure(mixed))
    assert total.bytes == du(mixed)
    assert total.apparent == sum(p.stat().st_size for p in mixed.rglob("*") if p.is_file())
    assert total.things == 33


def test_each_version_target_and_kind_has_its_own(mixed):
    told = disk_usage.measure(mixed)
    kernels = list(mixed.glob("**/kernels/*"))
    assert told["version"].parts["0.1.11"].bytes == du(mixed / "0.1.11-x86_64/kernels") - 4096
    assert told["kind"].parts["cuda-binary"].things == 8
    assert told["kind"].parts["kernel"].things == len(kernels) + 4
    fat = [*mixed.glob("**/f758*"), *mixed.glob("**/6756*")]
    assert told["target"].parts["sm_80,sm_90"].bytes == du(*fat)
    # A cubin of 0.1.14 has its checksum beside it.
    binary = next(mixed.glob("0.1.14/cuda-binaries/8a5f*.cubin"))
    assert told["target"].parts["sm_90"].bytes == du(
        binary, f"{binary}.sha256", *mixed.glob("**/75e7*"), *mixed.glob("**/a80a*"),
        *mixed.glob("**/ee3f*"),
    )  # fmt: skip


def test_a_file_with_several_names_counts_once(mixed):
    before = disk_usage.measure(mixed)["kind"].total()
    (source,) = mixed.glob("**/kernels/7606*")
    shutil.copytree(source, source.with_name("ff" * 32), copy_function=os.link)
    told = disk_usage.measure(mixed)
    total = told["kind"].total()
    assert total.bytes == du(mixed)
    assert total.bytes - before.bytes <= 8192 < total.apparent - before.apparent
    assert total.things == 34


def test_of_what_is_selected_a_file_counts_once_and_the_rest_not_at_all(mixed):
    (source,) = mixed.glob("**/kernels/7606*")
    other = mixed / "0.1.14/linux-x86_64/kernels" / ("ff" * 32)
    shutil.copytree(source, other, copy_function=os.link)
    told = disk_usage.measure(mixed, Filter(tilelang="0.1.15", targets=("sm_90a",)))
    paths = [*mixed.glob("0.1.15/**/7606*"), *mixed.glob("0.1.15/**/f008*")]
    paths += [*mixed.glob("**/9d21*"), *mixed.glob("**/314d*")]
    paths += [*mixed.glob("**/3996*"), *mixed.glob("**/84b6*")]
    (total,) = totals(told)
    assert (total.bytes, total.things) == (du(*paths), 6)
    assert told["version"].parts.keys() == {"0.1.15"}


def test_a_sparse_file_takes_what_the_disk_gives(mixed):
    (source,) = mixed.glob("**/kernels/7606*")
    with open(source / "hole", "wb") as file:
        file.truncate(2**30)
    total = disk_usage.measure(mixed)["kind"].total()
    assert total.bytes == du(mixed) < 2**30 < total.apparent


def test_links_are_not_followed(mixed, tmp_path):
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    (mixed / "0.1.15" / "again").symlink_to(mixed)
    (mixed / "out").symlink_to(tmp_path / "large")
    assert disk_usage.measure(mixed)["kind"].total().bytes == du(mixed)


def test_what_tlcache_keeps_is_told_apart_in_each_of_several_roots(mixed, tmp_path):
    base = tmp_path / "base"
    for name in ("one", "two"):
        shutil.copytree(mixed, base / name)
        (base / name / "tlcache/records/ab").mkdir(parents=True)
        (base / name / "tlcache/records/ab/x.json").write_text("{}")
    told = disk_usage.measure(base)
    (total,) = totals(told)
    assert total.bytes == du(base) and total.things == 66
    for measured in told.values():
        assert measured.parts["tlcache"].bytes == du(base / "one/tlcache", base / "two/tlcache")


def test_an_op_has_its_kernels_and_the_cuda_binaries_that_they_were_made_from(mixed, filed):
    (place,) = mixed.glob("**/kernels/7606*")
    told = filed.but(entry=str(place.relative_to(mixed)))
    record.write(mixed, told)
    ops = disk_usage.measure(mixed)["op"].parts
    assert ops["rms_norm"].bytes == du(place, *mixed.glob("**/3996*"))
    assert ops["rms_norm"].things == 2 and ops["no record"].things == 31


def test_a_root_that_is_missing_takes_nothing(cache_root):
    assert disk_usage.measure(cache_root)["kind"].parts == {}
