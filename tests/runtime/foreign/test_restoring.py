"""What a program sees of restored kernels, and of the hooks that restore them."""

from __future__ import annotations

import shutil

import pytest

from tests.runtime.foreign.conftest import Program

START = """
import os, torch
import tlcache, tilelang
from tilelang.jit import JITImpl, JITKernel
from tilelang.language.eager.builder import JITFunc
tlcache.accelerate()
import kernels, helpers, settings
from tlcache.runtime.foreign import accelerate
from tlcache import runtime
X = torch.arange(8, dtype=torch.float32)
def counted():
    found = vars(runtime.counters())
    return {name: found[name] for name in ("memory", "restored", "disk", "compiled")}
def lazy():
    return kernels.make(4, 1.0)(8)
def name(kernel):
    return type(kernel).__name__
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Program(tmp_path_factory.mktemp("program")).write()


@pytest.fixture(scope="module")
def warmed(fork, place, tmp_path_factory):
    """A root with both kernels of the program in it, and what they gave."""
    root = tmp_path_factory.mktemp("warmed") / "cache"
    code = START + "told['out'] = [lazy()(X).tolist(), kernels.eager(X).tolist()]"
    return root, fork(place, code, root)["out"]


@pytest.fixture
def warm(warmed, cache_root):
    """What both kernels gave, with a copy of that root in force."""
    shutil.copytree(warmed[0], cache_root)
    return warmed[1]


def test_a_restored_kernel_is_a_jit_kernel_that_gives_the_same(forked, place, warm):
    code = """
kernel = lazy()
told["class"] = [name(kernel), isinstance(kernel, JITKernel), kernel is lazy()]
told["out"] = [kernel(X).tolist(), kernels.eager(X).tolist()]
told["again"] = kernels.eager(X * 0).tolist()
told["counted"] = counted()
told["refused"] = accelerate.refusals()
"""
    told = forked(place, START + code)
    assert told["class"] == ["RestoredKernel", True, True]
    assert told["out"] == warm
    assert told["again"] == [3.5] * 8
    assert told["counted"] == {"memory": 1, "restored": 2, "disk": 0, "compiled": 0}
    assert told["refused"] == {}


def test_whatever_else_is_asked_is_answered_as_tilelang_would(forked, place, warm):
    asked = """
def look(kernel):
    return {
        "prim_func": kernel.prim_func.script(),
        "out_idx": list(kernel.out_idx),
        "params": [str(param.dtype) for param in kernel.params],
        "target": str(kernel.target),
        "host": str(kernel.target_host),
        "backend": kernel.execution_backend,
        "spec": kernel.execution_backend_spec.name,
        "source": kernel.get_kernel_source(),
        "host source": kernel.get_host_source(),
        "configs": kernel.pass_configs,
        "flags": kernel.compile_flags,
        "artifact": kernel.artifact is None,
        "adapter": type(kernel.adapter).__name__,
        "library": kernel.adapter.libpath if hasattr(kernel.adapter, "libpath") else None,
        "key": kernel._tilelang_cache_key,
        "path": kernel._tilelang_cache_path,
        "profiler": type(kernel.get_profiler()).__name__,
        "latency": kernel.latency,
        "attribute": hasattr(kernel, "no_such_thing"),
    }
told["lazy"] = look(lazy())
told["eager"] = look(kernels.eager.compile(X))
"""
    restored = forked(place, START + asked)
    real = forked(place, START.replace("tlcache.accelerate()", "") + asked)
    assert restored == real


def test_wrong_arguments_fail_as_they_do_with_tilelang(forked, place, warm):
    wrong = """
for key, arguments in {
    "none": (), "two": (X, X), "shape": (X[:4],), "dtype": (X.to(torch.int64),),
    "strides": (torch.arange(16, dtype=torch.float32)[::2],),
}.items():
    try:
        told[key] = lazy()(*arguments).tolist()
    except Exception as error:
        told[key] = f"{type(error).__name__}: {error}"
"""
    restored = forked(place, START + wrong)
    assert restored == forked(place, START.replace("tlcache.accelerate()", "") + wrong)


def test_stopping_puts_tilelangs_own_functions_back(forked, place):
    code = """
tlcache.unaccelerate()
from tilelang.language.eager import builder
def functions():
    return (builder.mutate, vars(JITImpl)["compile"], vars(JITImpl)["_infer_jit_mode"],
            vars(JITImpl)["__call__"], vars(JITFunc)["_build_tir_template"])
before = functions()
tlcache.accelerate(); tlcache.accelerate()
told["hooked"] = [a is b for a, b in zip(functions(), before)]
tlcache.unaccelerate()
told["back"] = [a is b for a, b in zip(functions(), before)]
kernel = lazy()
told["class"] = name(kernel)
"""
    told = forked(place, START + code)
    assert told["hooked"] == [False, False, False, True, False]
    assert told["back"] == [True] * 5
    assert told["class"] == "JITKernel"


MONITOR = """
seen = []
def monitor():
    for owner, method in ((JITImpl, "compile"), (JITKernel, "__init__")):
        inner = vars(owner)[method]
        def wrapper(self, *args, _inner=inner, _name=method, **kwargs):
            seen.append(_name)
            return _inner(self, *args, **kwargs)
        setattr(owner, method, wrapper)
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_monitor_that_patches_the_same_functions_sees_what_it_would(forked, place, warm, order):
    code = MONITOR + (
        "tlcache.unaccelerate(); monitor(); tlcache.accelerate()\n"
        if order == "before"
        else "monitor()\n"
    )
    code += """
told["class"] = name(lazy())
told["out"] = lazy()(X).tolist()
told["seen"] = list(seen)
kernel = lazy()
kernel.prim_func
told["elaborated"] = seen[len(told["seen"]):]
tlcache.unaccelerate()
seen.clear()
told["stopped"] = name(kernels.make(4, 1.0)(8))
told["seen then"] = list(seen)
"""
    told = forked(place, START + code)
    assert told["class"] == "RestoredKernel"
    assert told["out"] == warm[0]
    # One that stands in front of the hooks sees every request, and one behind them the real ones.
    assert told["seen"] == (["compile"] * 2 if order == "after" else [])
    assert told["elaborated"][-1] == "__init__"
    assert told["stopped"] == "JITKernel"
    assert "compile" in told["seen then"]


def test_threads_get_one_kernel(forked, place, warm):
    code = """
import threading
found, gate = [], threading.Barrier(8)
impl = kernels.make(4, 1.0)
def ask():
    gate.wait()
    found.append(impl.compile(8))
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
told["kernels"] = len({id(kernel) for kernel in found})
told["out"] = found[0](X).tolist()
told["counted"] = counted()
"""
    told = forked(place, START + code)
    assert told["kernels"] == 1
    assert told["out"] == warm[0]
    assert told["counted"] == {"memory": 7, "restored": 1, "disk": 0, "compiled": 0}


def test_a_fork_restores_for_itself_even_while_a_thread_is_restoring(forked, place, warm):
    code = """
import threading
impl = kernels.make(4, 1.0)
from tlcache.runtime.foreign import answering
from tlcache.runtime.foreign.call import Call
flight = answering.flight(Call(impl, (8,), {}).key)
flight.__enter__()
pid = os.fork()
if pid == 0:
    ok = impl(8)(X).tolist() == wanted and counted()["restored"] == 1
    os._exit(0 if ok else 1)
told["child"] = os.waitpid(pid, 0)[1]
flight.__exit__(None, None, None)
told["class"] = name(impl(8))
"""
    told = forked(place, f"wanted = {warm[0]!r}\n" + START + code)
    assert told == {"child": 0, "class": "RestoredKernel"}


def test_restored_and_compiled_kernels_live_together(forked, place, warm):
    code = """
old, new = lazy(), kernels.make(4, 5.0)(8)
told["classes"] = [name(old), name(new)]
told["out"] = [old(X).tolist(), new(X).tolist()]
told["other"] = kernels.eager(torch.zeros(3)).tolist()
told["counted"] = counted()
from tilelang.cache import _dispatch_map
told["kept"] = name(kernels.make(4, 5.0).compile(8))
"""
    told = forked(place, START + code)
    assert told["classes"] == ["RestoredKernel", "JITKernel"]
    assert told["out"] == [warm[0], [value + 4 for value in warm[0]]]
    assert told["other"] == [3.5] * 3
    assert told["counted"]["restored"] == 1
    assert told["kept"] == "JITKernel"


def test_a_negative_output_index_keeps_its_key(forked, place, warm):
    code = """
keys = [kernels.make(4, 1.0)(n)._tilelang_cache_key for n in (8, 16, 24)]
told["keys"] = keys
told["indices"] = kernels.make(4, 1.0).out_idx
"""
    first, second = forked(place, START + code), forked(place, START + code)
    assert first == second
    assert first["indices"] == [-1]


@pytest.mark.parametrize("what", ["call", "library"])
def test_a_damaged_file_is_a_miss_and_is_made_anew(forked, place, warm, cache_root, what):
    pattern = "tlcache/calls/*/*.json" if what == "call" else "*/*/kernels/*/kernel_lib.so"
    for path in cache_root.glob(pattern):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    code = "kernel = lazy(); told['class'] = name(kernel); told['out'] = kernel(X).tolist()"
    told = forked(place, START + code)
    assert told == {"class": "JITKernel", "out": warm[0]}
    assert forked(place, START + code) == {"class": "RestoredKernel", "out": warm[0]}


def test_a_root_that_others_can_write_restores_nothing(forked, place, warm, cache_root):
    code = "kernel = lazy(); told['class'] = name(kernel); told['out'] = kernel(X).tolist()"
    (cache_root / "tlcache" / "calls").chmod(0o777)
    told = forked(place, START + code)
    assert told == {"class": "JITKernel", "out": warm[0]}


def test_the_environment_rules_restoring_out(forked, place, warm):
    code = "told['class'] = name(lazy())"
    assert forked(place, START + code, TLCACHE_RESTORE="0") == {"class": "JITKernel"}


def test_a_cache_that_is_switched_off_restores_nothing(forked, place, warm):
    code = "tilelang.disable_cache(); told['class'] = name(lazy())"
    assert forked(place, START + code) == {"class": "JITKernel"}


def test_checking_fails_loudly_where_a_kernel_would_be_another_one(forked, place, warm):
    code = """
from tlcache.store import calls
from tlcache.runtime.foreign import answering
from tlcache.runtime.foreign.call import Call
root = os.environ["TILELANG_CACHE_DIR"]
other = kernels.make(4, 5.0)
other(8)
def answer(impl):
    call = Call(impl, (8,), {})
    return call.key, next(call.answers())[1]
(wrong, found), (right, _) = answer(other), answer(kernels.make(4, 1.0))
calls.write_answer(root, right, found)
from tlcache.errors import RestoreError
from tilelang.cache import _dispatch_map
def forget():
    answering._state.kernels.clear()
    _dispatch_map["cython"]._memory_cache.clear()
forget()
os.environ["TLCACHE_CHECK"] = "1"
try:
    told["kernel"] = name(lazy())
except RestoreError as error:
    told["message"] = error.message
os.environ["TLCACHE_CHECK"] = "0"
forget()
try:
    lazy().prim_func
except RestoreError as error:
    told["lazily"] = error.message
"""
    told = forked(place, START + code)
    assert "TLCACHE_CHECK: the kernel of kernels:make.<locals>.kernel" in told["message"]
    assert "was restored, and TileLang makes" in told["lazily"]


def test_what_was_made_before_something_changed_is_neither_restored_nor_filed(forked, place, warm):
    code = """
impl = kernels.make(4, 2.0)
before = impl(8)(X).tolist()
kernels.FACTOR = 100.0
told["same"] = impl.compile(8)(X).tolist() == before      # as TileLang keeps what it traced
told["refused"] = list(accelerate.refusals())
told["new"] = kernels.make(4, 2.0)(8)(X).tolist() != before
"""
    told = forked(place, START + code)
    assert told["same"] and told["new"]
    assert told["refused"] == ["a call that was made before, of something that has changed since"]


def test_kernels_that_cannot_be_restored_are_counted_by_reason(forked, program):
    place = (
        program("impure")
        .edit("helpers.py", "return 2.0", "return float(len(open('settings.py').read()))")
        .write()
    )
    code = """
told["class"] = [name(lazy()), name(kernels.make(4, 1.0).compile(8))]
told["refused"] = accelerate.refusals()
from tlcache.runtime import layers
told["told"] = layers.compiles()["not_restored"]
"""
    for _ in range(2):
        told = forked(place, START + code)
        assert told["class"] == ["JITKernel"] * 2
        assert told["refused"] == {"it calls open()": 2}
        assert told["told"] == [{"reason": "it calls open()", "count": 2}]


def test_a_rewriting_that_was_put_off_is_of_what_the_function_was(forked, place):
    code = """
def outer(n):
    import tilelang.language as T
    held = n
    def change(value):
        nonlocal held
        held = value
    def make(m):
        value = held
        @T.prim_func
        def main(X: T.Tensor((m,), "float32")):
            with T.Kernel(1) as _:
                X[0] = value
        return main
    return make, change
"""
    path = f"{place}/outers.py"
    with open(path, "w") as file:
        file.write(code)
    looked = """
import outers
make, change = outers.outer(4)
impl = tilelang.jit(make)
told["put off"] = type(impl.func.ir_gen).__name__
change(5)
generator = impl.func.ir_gen
cells = dict(zip(generator.gen.__code__.co_freevars,
                 [cell.cell_contents for cell in generator.gen.__closure__]))
told["held"] = cells["held"]
told["source"] = generator.source
told["hints"] = generator.extra_type_hints
"""
    put_off = forked(place, START + looked)
    real = forked(place, START.replace("tlcache.accelerate()", "") + looked)
    assert put_off.pop("put off") == "Deferred"
    assert real.pop("put off") == "IRGenerator"
    assert put_off == real
    assert real["held"] == 4


def test_a_call_that_is_left_to_tilelang_keeps_none_of_its_tensors_alive(forked, place, warm):
    code = """
import gc, weakref
kernels.eager(X)
kernels.FACTOR = 100.0
given = torch.ones(8)
reference = weakref.ref(given)
kernels.eager.compile(given)
del given
gc.collect()
told["alive"] = reference() is not None
told["refused"] = sum(accelerate.refusals().values())
"""
    assert forked(place, START + code) == {"alive": False, "refused": 1}
