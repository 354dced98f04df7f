"""The action key: the same wherever the same kernel would be compiled, and another where not."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

import tlcache
from tlcache.spec import KernelSpec
from tlcache.targets import CPU, Target

KERNEL = "ops.kernels.rms_norm:rms_norm"
SPECS = [
    KernelSpec(
        KERNEL,
        {"M": rows, "N": 4096, "eps": 1e-5, "dtype": dtype},
        {"block_m": 1, "threads": 512, "each": 1, "prefetch": True},
        Target(target),
    )
    for rows in (1, "dynamic")
    for dtype in ("bfloat16", "float32")
    for target in ("sm_90a", "cpu")
]
KEYS = """
import json, sys
from tlcache.spec import KernelSpec
exec(sys.argv[2])
specs = [KernelSpec.from_json(data) for data in json.loads(sys.argv[1])]
keys = [spec.action_key() for spec in specs]
assert "tilelang" not in sys.modules or "import tilelang" in sys.argv[2]
print("RESULT " + json.dumps(keys))
"""


def arguments(specs=SPECS, before="pass"):
    return json.dumps([spec.to_json() for spec in specs]), before


def answer(out):
    return json.loads(out.rpartition("RESULT ")[2])


@pytest.fixture
def keys(python):
    """The keys of specs, computed by a fresh process."""

    def keys(specs=SPECS, before="pass", **options):
        done = python(KEYS, *arguments(specs, before), **options)
        assert done.code == 0, done.err
        return answer(done.out)

    return keys


@pytest.fixture
def here(cache_root):
    """The keys of the specs, computed in this process."""
    return [spec.action_key() for spec in SPECS]


def test_a_key_is_64_hexadecimal_digits_and_another_for_each_spec(here):
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in here)
    assert len(set(here)) == len(SPECS)


def test_a_key_is_the_same_in_every_process_directory_and_hash_seed(keys, here, tmp_path):
    assert keys() == here
    for seed in ("0", "12345"):
        assert keys(env={"PYTHONHASHSEED": seed}, cwd="/") == here
    assert keys(env={"LC_ALL": "C", "HOME": str(tmp_path), "PYTHONUTF8": "1"}) == here
    assert keys(env={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONOPTIMIZE": "2"}) == here


def test_a_key_does_not_depend_on_what_else_was_asked_before(keys, here):
    assert keys(list(reversed(SPECS))) == list(reversed(here))
    assert keys(SPECS[3:4]) == here[3:4]
    assert keys(before="from ops import catalog") == here
    assert keys(before="import ops.kernels.rms_norm as k; k.rms_norm.cache_info()") == here


def test_a_key_is_the_same_once_tilelang_and_torch_are_imported(keys, here):
    assert keys(before="import torch; import tilelang; import ops.norms") == here


def test_a_key_is_the_same_for_each_order_of_a_workloads_fields(here):
    for spec, key in zip(SPECS, here, strict=True):
        backwards = KernelSpec(
            spec.kernel,
            dict(reversed(list(spec.workload.items()))),
            dict(reversed(list(spec.schedule.items()))),
            spec.target,
        )
        assert backwards.action_key() == key


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "ops.kernels.rms_norm:RMSNormWorkload"},
        {"workload": {"M": 1, "N": 4096, "eps": 1e-6, "dtype": "bfloat16"}},
        {"workload": {"M": 2, "N": 4096, "eps": 1e-5, "dtype": "bfloat16"}},
        {"schedule": {"block_m": 2, "threads": 256}},
        {"schedule": {"block_m": 1, "threads": 128}},
        {"target": "sm_90"},
        {"target": "sm_80"},
        {"pass_configs": {"tl.disable_tma_lower": True}},
        {"compile_flags": ["-O3"]},
        {"execution_backend": "nvrtc"},
    ],
    ids=json.dumps,
)
def test_a_key_is_another_for_another_spec(here, change):
    changed = KernelSpec.from_json({**SPECS[0].to_json(), **change})
    assert changed.action_key() != here[0]


def test_the_variable_that_tilelang_folds_into_its_own_key_is_in_ours(keys, here):
    legacy = keys(env={"TILELANG_LAYOUT_COST_MODEL": "legacy"})
    other = keys(env={"TILELANG_LAYOUT_COST_MODEL": "other"})
    assert not set(legacy) & set(here)
    assert not set(legacy) & set(other)
    assert keys(env={"TILELANG_LAYOUT_COST_MODEL": ""}) == here


def test_variables_that_do_not_change_the_kernel_are_not_in_the_key(keys, here, tmp_path):
    elsewhere = {
        "TILELANG_CACHE_DIR": str(tmp_path / "elsewhere"),
        "TILELANG_TMP_DIR": str(tmp_path),
        "CUDA_HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": os.environ["PATH"] + os.pathsep + str(tmp_path),
    }
    assert keys(env=elsewhere) == here


# --- other Pythons ---


@functools.cache
def interpreter(minor: int) -> str | None:
    """A Python 3.`minor` that runs: of PATH, or installed beside the one that runs this."""
    name = f"python3.{minor}"
    beside = sorted(Path(sys.base_prefix).parent.glob(f"*/bin/{name}"))
    for program in filter(None, [shutil.which(name), *map(str, beside)]):
        try:
            done = subprocess.run(
                [program, "-c", "import sys; print(sys.version_info[:2])"],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        if done.returncode == 0 and done.stdout.strip() == f"(3, {minor})":
            return program
    return None


@pytest.fixture
def other_python(run, tmp_path):
    """Run Python source with another Python, which sees our packages and those whose versions
    count.
    """
    seen = tmp_path / "site"
    seen.mkdir()
    for module, distribution in (
        ("tilelang", "tilelang"),
        ("tvm_ffi", "apache-tvm-ffi"),
        ("wrapt", "wrapt"),
    ):
        spec = importlib.util.find_spec(module)
        (seen / module).symlink_to(spec.submodule_search_locations[0])
        info = Path(metadata.distribution(distribution).locate_file("")) / (
            f"{distribution.replace('-', '_')}-{metadata.version(distribution)}.dist-info"
        )
        (seen / info.name).symlink_to(info)
    checkout = Path(tlcache.__file__).parents[1]

    def other_python(minor, source, *args):
        program = interpreter(minor)
        if program is None:
            pytest.skip(f"no Python 3.{minor} here")
        path = os.pathsep.join([str(checkout), str(seen)])
        return run(
            [program, "-c", source, *args],
            env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        )

    return other_python


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_a_key_is_the_same_on_every_python(other_python, here, minor):
    done = other_python(minor, KEYS, *arguments())
    assert done.code == 0, done.err
    assert answer(done.out) == here


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_the_operators_are_known_on_every_python_without_torch(other_python, here, minor):
    source = """
import json, sys
from ops.catalog import OPERATORS
from tlcache.targets import Target
spec = OPERATORS["rms_norm"].spec({"M": 1, "N": 4096, "eps": 1e-5}, Target("sm_90a"))
print("RESULT " + json.dumps([spec.action_key(), "torch" in sys.modules]))
"""
    done = other_python(minor, source)
    assert done.code == 0, done.err
    assert answer(done.out) == [here[0], False]


SYNTAX = {
    "texts": "return 'q\"', u'u' \"u\", b'\\x00\\xff', '\\ud800 \\x00', r'\\d', 'é'",
    "characters_of_a_newer_unicode": "return '\U0001fae8 \U0001cc00'",
    "numbers": "return 1e400, -0.0, 1_000, 0xFF, 1j, 10**30, 1e22, 0.1, 1234567890123456789012345",
    "constants": "return ..., None, True, (), [], {}",
    "fstring": "return f'{M!r} {{x}} {M=} {N:.3f} {M:}' f'{M,}' 'tail' rf'\\d{M}'",
    "fstring_in_an_fstring": "return f'{M}{f\"{N}\"}' 'a' f'' f'{M:%H:%M}'",
    "fstring_in_a_format": "return f'{M:>{N}}' f'{M!r:^{N}.{N}}' f'{M:{N}}' f'{M:a{N}b}'",
    "lambda": "return lambda *x, y=1, **z: {*x, y, *z}",
    "match": (
        "match M:\n"
        "  case [1, *_] | {'k': _, **r} | str(): pass\n"
        "  case complex(real=-1, imag=i) as z if (n := M): return n"
    ),
    "loops": "for i, (j, *k) in N: M[1:2, ::3, ...] += i if j else k\nelse: return M[N, 1]",
    "with": "with M as e, N: return [x for x in e if x for y in x]",
    "try": "try: del M\nexcept (A, B) as e: raise e from None\nexcept C: pass\nfinally: global G",
    "class": "@M\nclass K(N, metaclass=M):\n  'Doc.'\n  x: int\n  (y): int = 1\nreturn K",
    "async": "async def g(): return [z async for z in M if await z]\nreturn g",
    "signature": "def g(p, q=1, /, r: int = 2, *s, t, u=M, **v) -> N: yield\nreturn g",
    "imports": "import os.path as p, sys\nfrom math import sin as s",
    "a_module_that_only_newer_pythons_have": "import tomllib\nreturn tomllib",
    "builtins": "return print(M, end=''), range(N), ExceptionGroup, EncodingWarning",
    "empty": "",
}
DIGESTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tlcache.closure import factory_digest
names = sys.argv[2].split()
print("RESULT " + json.dumps({name: factory_digest(f"odd_{name}:factory") for name in names}))
"""


def test_any_syntax_has_the_same_digest_on_every_python(other_python, tmp_path):
    for name, body in SYNTAX.items():
        text = "def factory(M, N=2):\n  'Doc.'\n" + textwrap.indent(body, "  ")
        (tmp_path / f"odd_{name}.py").write_text(text, encoding="utf-8")
    digests = {}
    for minor in filter(interpreter, (10, 11, 12, 13)):
        done = other_python(minor, DIGESTS, str(tmp_path), " ".join(SYNTAX))
        assert done.code == 0, done.err
        digests[minor] = answer(done.out)
    if len(digests) < 2:
        pytest.skip("no other Python here")
    differing = {
        name: {minor: found[name][:8] for minor, found in digests.items()}
        for name in SYNTAX
        if len({found[name] for found in digests.values()}) > 1
    }
    assert differing == {}


def test_the_cpu_and_a_gpu_have_keys_of_their_own(here):
    by_target = {CPU: set(), Target("sm_90a"): set()}
    for spec, key in zip(SPECS, here, strict=True):
        by_target[spec.target].add(key)
    assert len(by_target[CPU]) == len(by_target[Target("sm_90a")]) == len(SPECS) // 2
