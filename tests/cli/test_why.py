"""`tlcache why`: what is missing and why, of a document or of one workload."""

from __future__ import annotations

import pytest

from tlcache.store import layout

MAKE = """
from tlcache import operators, runtime, targets

spec = operators.get("rms_norm").spec({"M": 1, "N": 64, "dtype": "float32"}, targets.CPU)
runtime.resolve(spec)
"""
ONE = ("rms_norm", "M=1", "N=64", "dtype=float32", "--target", "cpu")

# A kernel of a project of one's own; BY is what an edit changes.
MINE = """
BY = 2.0


def double(N):
    import tilelang
    import tilelang.language as T

    by = BY

    @tilelang.jit(out_idx=[1], target={"kind": "c"}, execution_backend="cython")
    def double():
        @T.prim_func
        def double(x: T.Tensor((N,), "float32"), y: T.Tensor((N,), "float32")):
            with T.Kernel(1):
                for i in T.serial(N):
                    y[i] = x[i] * by

        return double

    return double
"""


def test_one_workload_that_is_there_is_a_hit(tlcache, root):
    ran = tlcache("why", *ONE)
    assert (ran.code, ran.out) == (0, "") and "1 kernel, all there" in ran.err
    told = tlcache("why", *ONE, "--json")
    assert told.code == 0 and told.json["kernels"][0]["cause"] == "hit"
    assert told.json["summary"] == {"total": 1, "hits": 1, "causes": {"hit": 1}}


def test_a_document_is_answered_kernel_by_kernel(tlcache, root, shapes):
    path = shapes({"op": "rms_norm", "M": [1, 2], "N": 64, "dtype": "float32"})
    ran = tlcache("why", "--shapes", path, "--target", "cpu")
    assert ran.code == 1
    first, second = ran.out.splitlines()
    assert first.startswith("no record        rms_norm M=2 N=64")
    assert "there are M=1 N=64" in second
    assert "1 of 2 kernels is missing: no record 1" in ran.err
    assert f"hint: `tlcache warm --shapes {path} --target cpu`" in ran.err
    told = tlcache("why", "--shapes", path, "--target", "cpu", "--json").json
    assert [one["cause"] for one in told["kernels"]] == ["hit", "no record"]
    assert told["schema"] == 1 and told["kernels"][1]["where"] == "workloads[0]"


def test_another_schedule_and_another_target_are_told(tlcache, root):
    ran = tlcache("why", *ONE[:4], "--target", "sm90", "--json")
    (one,) = ran.json["kernels"]
    assert one["cause"] == "other target" and one["loadable"]
    assert {"what": "other target", "there": "cpu", "here": "sm_90a"} in one["differences"]


def test_an_edit_of_the_factory_is_told_as_another_source(tlcache, cache_root, tmp_path, shapes):
    (tmp_path / "mine.py").write_text(MINE)
    path = shapes({"kernel": "mine:double", "args": {"N": 8}})
    warm = tlcache("warm", "--shapes", path, "--target", "cpu")
    assert warm.code == 0, warm.err
    asked = ["why", "mine:double", "N=8", "--target", "cpu"]
    (tmp_path / "mine.py").write_text(MINE + "\n# a comment is no edit\n")
    assert tlcache(*asked).code == 0
    (tmp_path / "mine.py").write_text(MINE.replace("BY = 2.0", "BY = 3.0"))
    ran = tlcache(*asked)
    assert ran.code == 1 and ran.out.startswith("source           double N=8 cpu\n")
    assert "mine:double.double.by was 2.0 and is 3.0" in ran.out


def test_a_damaged_library_is_told_with_the_command_that_repairs(tlcache, root):
    (place,) = layout.entries(root)
    library = place.path / "kernel_lib.so"
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    library.write_bytes(data)
    ran = tlcache("why", *ONE)
    assert ran.code == 1 and ran.out.startswith("damaged ") and str(library) in ran.out
    assert "hint: `tlcache verify --repair`" in ran.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "takes either --shapes or one workload"),
        (["--shapes", "f", "rms_norm"], "takes either --shapes or one workload"),
        (["--shapes", "f", "--schedule", "a=1"], "--schedule goes with one workload"),
        (["rms_norm", "M"], "'M' is not of the form FIELD=VALUE"),
        (["rms_norm", "M=1", "M=2"], "M is given twice"),
        (["rms_nor", "M=1"], "unknown operator 'rms_nor'"),
        (["rms_norm", "M=null", "N=1"], "is no workload"),
        (["rms_norm", "M=0", "N=64", "dtype=float32"], "the command line: workloads[0].M"),
        (["no.such:factory"], "no.such"),
    ],
)
def test_wrong_input_is_one_error_with_exit_code_2(tlcache, arguments, error):
    ran = tlcache("why", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert error in ran.err and "Traceback" not in ran.err


def test_a_root_that_others_can_write_is_refused_as_it_would_be_by_a_process(tlcache, root):
    root.chmod(0o777)
    ran = tlcache("why", *ONE)
    assert ran.code == 3 and "can be written by everybody" in ran.err
