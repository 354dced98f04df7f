"""KernelSpec: frozen, hashable, printable, and JSON both ways."""

from __future__ import annotations

import copy
import json
import pickle
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlcache.errors import SpecError
from tlcache.spec import KernelSpec
from tlcache.targets import CPU, Target

KERNEL = "ops.kernels.rms_norm:rms_norm"
WORKLOAD = {"M": 4096, "N": 4096, "eps": 1e-05, "dtype": "bfloat16"}
SCHEDULE = {"block_m": 1, "threads": 256}


def spec(**changes):
    fields = {
        "kernel": KERNEL,
        "workload": WORKLOAD,
        "schedule": SCHEDULE,
        "target": Target("sm_90a"),
        "pass_configs": {"tl.disable_tma_lower": True},
        "compile_flags": ["-O3"],
        **changes,
    }
    positional = [fields.pop(name) for name in ("kernel", "workload", "schedule", "target")]
    return KernelSpec(*positional, **fields)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.dictionaries(st.text(), VALUES, max_size=4)
TARGETS = st.sampled_from(["cpu", "sm_80", "sm_90a", '{"kind":"llvm","mcpu":"native"}'])
SPECS = st.builds(
    KernelSpec,
    st.text(),
    FIELDS,
    FIELDS,
    TARGETS.map(Target),
    pass_configs=FIELDS,
    compile_flags=st.lists(st.text(), max_size=3),
    execution_backend=st.none() | st.sampled_from(["tvm_ffi", "cython", "nvrtc"]),
)


def test_a_spec_is_frozen():
    made = spec()
    for name in ("kernel", "workload", "target", "execution_backend", "another"):
        with pytest.raises(AttributeError, match=f"{name} cannot be set"):
            setattr(made, name, 1)
        with pytest.raises(AttributeError, match=f"{name} cannot be deleted"):
            delattr(made, name)
    assert made == spec()


def test_what_a_spec_is_made_of_cannot_be_changed_in_it():
    made = spec()
    for name in ("workload", "schedule", "pass_configs"):
        with pytest.raises(TypeError):
            getattr(made, name)["M"] = 1
    assert made.to_json() == json.loads(made.canonical())


def test_a_spec_stays_what_it_was_when_values_outside_it_change():
    tiles = [64, 64]
    values = {"tiles": tiles}
    made = spec(workload=values, schedule=values, pass_configs=values)
    before = json.loads(made.canonical())
    values["more"] = 1
    made.to_json()["workload"]["more"] = 1
    assert made.to_json() == before
    tiles.append(128)
    assert made.to_json() == before
    made.to_json()["workload"]["tiles"].append(256)
    assert made.to_json() == before


def test_specs_that_say_the_same_are_equal_whatever_the_order_of_their_fields():
    backwards = spec(
        workload=dict(reversed(WORKLOAD.items())), schedule=dict(reversed(SCHEDULE.items()))
    )
    assert backwards == spec()
    assert hash(backwards) == hash(spec())
    assert len({backwards, spec()}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "ops.kernels.rms_norm:other"},
        {"workload": {**WORKLOAD, "M": 4097}},
        {"workload": {**WORKLOAD, "M": True}},
        {"workload": {**WORKLOAD, "M": 4096.0}},
        {"workload": {**WORKLOAD, "M": "4096"}},
        {"workload": {**WORKLOAD, "more": None}},
        {"schedule": {"block_m": 2, "threads": 256}},
        {"target": Target("sm_90")},
        {"pass_configs": {}},
        {"compile_flags": []},
        {"compile_flags": ["-O3", "-O3"]},
        {"execution_backend": "nvrtc"},
    ],
    ids=lambda change: json.dumps(change, default=str),
)
def test_specs_that_differ_in_one_field_are_not_equal(change):
    assert spec(**change) != spec()
    assert spec(**change).canonical() != spec().canonical()


def test_the_order_of_compile_flags_counts():
    assert spec(compile_flags=["-a", "-b"]) != spec(compile_flags=["-b", "-a"])


def test_a_spec_is_not_equal_to_anything_else():
    assert spec() != spec().to_json()
    assert spec() != spec().canonical()


def test_the_backend_is_the_one_that_tilelang_picks_for_the_target():
    assert spec().execution_backend == "tvm_ffi"
    assert spec(target=CPU).execution_backend == "cython"
    assert spec(execution_backend="nvrtc").execution_backend == "nvrtc"


@settings(max_examples=75, deadline=None)
@given(SPECS)
def test_json_gives_back_the_spec_that_was_written(made):
    for again in (
        KernelSpec.from_json(made.to_json()),
        KernelSpec.from_json(json.loads(json.dumps(made.to_json()))),
        KernelSpec.from_json(json.loads(made.canonical())),
        pickle.loads(pickle.dumps(made)),
        copy.deepcopy(made),
    ):
        assert again == made
        assert hash(again) == hash(made)
        assert again.canonical() == made.canonical()
        assert again.to_json() == made.to_json()


@settings(max_examples=75, deadline=None)
@given(SPECS, SPECS)
def test_specs_are_equal_exactly_when_their_canonical_json_is(left, right):
    assert (left == right) == (left.canonical() == right.canonical())
    assert left.canonical().isascii()
    assert json.dumps(
        json.loads(left.canonical()), sort_keys=True, separators=(",", ":")
    ) == left.canonical()  # fmt: skip


@pytest.mark.parametrize("name", ["workload", "schedule", "pass_configs"])
@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), [float("nan")], {1, 2}, b"x", object, 1j],
    ids=repr,
)
def test_a_value_that_is_not_finite_json_is_refused(name, value):
    with pytest.raises(SpecError, match="holds a value that is not JSON"):
        spec(**{name: {"x": value}})


def test_a_value_that_is_nested_too_deep_or_in_itself_is_refused():
    circular: list[object] = []
    circular.append(circular)
    deep: list[object] = []
    for _ in range(sys.getrecursionlimit() + 100):
        deep = [deep]
    for value in (circular, deep):
        with pytest.raises(SpecError, match="not JSON"):
            spec(workload={"x": value})


def test_a_field_whose_name_is_no_text_is_refused():
    with pytest.raises(SpecError, match="not JSON"):
        spec(workload={1: 2})


@pytest.mark.parametrize("name", sorted(spec().to_json()))
def test_json_that_lacks_a_field_is_refused(name):
    data = spec().to_json()
    del data[name]
    with pytest.raises(SpecError, match=f"a spec's {name} is None"):
        KernelSpec.from_json(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kernel", 5),
        ("kernel", None),
        ("workload", []),
        ("workload", "M"),
        ("schedule", None),
        ("schedule", [["block_m", 1]]),
        ("target", {"kind": "c"}),
        ("pass_configs", 1),
        ("compile_flags", "-O3"),
        ("compile_flags", {"-O3": 1}),
        ("execution_backend", True),
    ],
)
def test_json_with_a_field_of_the_wrong_type_is_refused(name, value):
    with pytest.raises(SpecError, match=f"a spec's {name} is"):
        KernelSpec.from_json({**spec().to_json(), name: value})


def test_json_with_compile_flags_that_are_no_texts_is_refused():
    with pytest.raises(SpecError, match="compile_flags are strings"):
        KernelSpec.from_json({**spec().to_json(), "compile_flags": ["-O3", 3]})


def test_json_with_an_unknown_field_is_refused():
    with pytest.raises(SpecError, match="a spec has no field 'colour'"):
        KernelSpec.from_json({**spec().to_json(), "colour": "red"})


@pytest.mark.parametrize("target", ["", "{m_90a", '{"arch":"sm_90"}', "banana"])
def test_json_whose_target_is_no_canonical_target_is_refused(target):
    with pytest.raises(SpecError, match="target"):
        KernelSpec.from_json({**spec().to_json(), "target": target})


def test_json_whose_backend_is_empty_is_a_spec_error_too():
    data = {**spec().to_json(), "target": "{m_90a", "execution_backend": ""}
    with pytest.raises(SpecError):
        KernelSpec.from_json(data)


@pytest.mark.parametrize("data", [None, [], "x", 5, True, 1.5])
def test_json_that_is_no_object_is_refused(data):
    with pytest.raises(SpecError, match="a spec is a JSON object"):
        KernelSpec.from_json(data)


@settings(max_examples=75, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(spec().to_json())) | st.text(), VALUES))
def test_any_json_object_is_a_spec_or_a_spec_error(changes):
    try:
        made = KernelSpec.from_json({**spec().to_json(), **changes})
    except SpecError:
        return
    assert KernelSpec.from_json(made.to_json()) == made


def test_a_spec_prints_its_name_workload_schedule_and_target():
    made = spec()
    assert str(made) == "rms_norm M=4096 N=4096 eps=1e-05 bf16 block_m=1 threads=256 sm_90a"
    assert repr(made) == f"KernelSpec({made})"
    assert made.title == "rms_norm M=4096 N=4096 eps=1e-05 bf16 sm_90a"
    assert made.name == "rms_norm"
    assert made.workload_text == "M=4096 N=4096 eps=1e-05 bf16"
    assert made.schedule_text == "block_m=1 threads=256"


def test_a_spec_without_workload_or_schedule_prints_without_gaps():
    assert str(spec(workload={}, schedule={})) == "rms_norm sm_90a"
    assert spec(workload={}).title == "rms_norm sm_90a"


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        ({"dtype": "float16"}, "fp16"),
        ({"dtype": "float32"}, "fp32"),
        ({"dtype": "float8_e4m3"}, "float8_e4m3"),
        ({"dtype": None}, "null"),
        ({"M": "dynamic", "causal": True}, "M=dynamic causal=True"),
        ({"tiles": [64, 64], "bias": None}, "tiles=[64,64] bias=null"),
    ],
)
def test_a_workload_is_written_for_people(workload, text):
    assert spec(workload=workload).workload_text == text


def test_one_compile_flag_may_be_a_text_of_its_own():
    one = KernelSpec("a.b:c", {}, {}, CPU, compile_flags="-O3")
    assert one.compile_flags == ("-O3",)
    assert one == KernelSpec("a.b:c", {}, {}, CPU, compile_flags=["-O3"])
