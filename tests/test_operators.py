"""Operators: what they are called with, and what cannot be."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlcache import operators
from tlcache.errors import SpecError
from tlcache.operators import WorkloadError
from tlcache.spec import KernelSpec
from tlcache.targets import CPU, Target
from tlcache.warm import shapes

SM90 = Target("sm_90a")
WORKLOAD = {"M": 128, "N": 4096, "eps": 1e-5, "dtype": "bfloat16"}
SCHEDULE = {"block_m": 1, "threads": 256, "each": 1, "prefetch": False}
ONLY = {"block_m": 1, "threads": 1, "each": 1, "prefetch": False}
"""The one schedule on the CPU."""


@pytest.fixture(scope="module")
def rms_norm():
    return operators.get("rms_norm")


def test_the_entry_points_of_installed_packages_bring_rms_norm(rms_norm):
    assert operators.installed()["rms_norm"] is rms_norm
    assert (rms_norm.name, rms_norm.kernel) == ("rms_norm", "ops.kernels.rms_norm:rms_norm")


def test_finding_the_operators_imports_neither_torch_nor_tilelang(python):
    done = python(
        "import sys; from tlcache import operators; operators.installed()\n"
        "print(sorted({'torch', 'tilelang', 'tvm', 'tvm_ffi', 'numpy'} & set(sys.modules)))"
    )
    assert (done.code, done.out) == (0, "[]\n"), done.err


def test_an_unknown_operator_gets_a_suggestion_and_the_list():
    with pytest.raises(SpecError, match="unknown operator 'rmsnorm'") as caught:
        operators.get("rmsnorm")
    assert "did you mean `rms_norm`?" in caught.value.hint
    assert "installed: " in caught.value.hint
    with pytest.raises(SpecError, match="unknown operator 'zzz'") as caught:
        operators.get("zzz")
    assert "did you mean" not in caught.value.hint


def test_an_operators_spec_names_its_kernel_workload_schedule_and_target(rms_norm):
    assert rms_norm.spec(WORKLOAD, SM90) == KernelSpec(
        "ops.kernels.rms_norm:rms_norm", WORKLOAD, SCHEDULE, SM90
    )


def test_fields_with_a_default_may_be_left_out(rms_norm):
    made = rms_norm.spec({"M": "dynamic", "N": 64}, CPU)
    assert made.workload == {"M": "dynamic", "N": 64, "eps": 1e-6, "dtype": "bfloat16"}
    assert made.schedule == ONLY


@pytest.mark.parametrize(
    ("dtype", "name"), [("bf16", "bfloat16"), ("half", "float16"), ("fp16", "float16")]
)
def test_a_dtypes_short_name_gives_the_same_spec(rms_norm, dtype, name):
    assert rms_norm.spec({**WORKLOAD, "dtype": dtype}, SM90) == rms_norm.spec(
        {**WORKLOAD, "dtype": name}, SM90
    )


def test_an_integral_eps_gives_the_same_spec_as_its_float(rms_norm):
    assert rms_norm.spec({**WORKLOAD, "eps": 0}, SM90) == rms_norm.spec(
        {**WORKLOAD, "eps": 0.0}, SM90
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [("epsilon", "did you mean `eps`?"), ("type", "did you mean `dtype`?"), ("quux", None)],
)
def test_an_unknown_field_is_named_and_gets_a_suggestion(rms_norm, name, hint):
    with pytest.raises(WorkloadError, match=f"rms_norm has no field '{name}'") as caught:
        rms_norm.spec({**WORKLOAD, name: 1}, SM90)
    assert (caught.value.field, caught.value.hint) == (name, hint)
    assert "it takes M, N, eps, dtype" in caught.value.message


@pytest.mark.parametrize("missing", ["M", "N"])
def test_a_missing_field_is_named(rms_norm, missing):
    values = {name: value for name, value in WORKLOAD.items() if name != missing}
    with pytest.raises(WorkloadError, match=f"rms_norm needs {missing}; it takes M, N") as caught:
        rms_norm.spec(values, SM90)
    assert caught.value.field == missing


def test_a_type_error_of_the_workload_itself_is_not_taken_for_a_missing_field(rms_norm):
    @dataclass(frozen=True)
    class Clumsy:
        M: int
        scale: float = 1.0

        def __post_init__(self):
            if self.M % 2:  # a TypeError of its own for a text
                raise WorkloadError("M", f"M is {self.M}; it is even")

    clumsy = replace(rms_norm, name="clumsy", workload=Clumsy)
    for values in ({"M": None}, {"M": None, "scale": 2.0}):
        with pytest.raises((TypeError, SpecError)) as caught:
            clumsy.spec(values, SM90)
        assert "needs" not in str(caught.value)
        assert "NoneType" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("M", value) for value in (0, -1, 2**31, 1.0, True, None, "many", "128", [128])),
        *(("N", value) for value in (0, -4096, 65537, 4096.0, True, None, "4096", "dynamic")),
        *(("eps", value) for value in (-1e-6, float("nan"), float("inf"), "1e-5", None, True, 1j)),
        *(("dtype", value) for value in ("float64", "int8", "", None, 16, ["float16"])),
    ],
)
def test_an_impossible_value_is_named_with_its_field(rms_norm, field, value):
    with pytest.raises(WorkloadError) as caught:
        rms_norm.spec({**WORKLOAD, field: value}, SM90)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field} is {value!r}; ")


@pytest.mark.parametrize(
    ("field", "value"), [("M", 1), ("M", 2**31 - 1), ("N", 1), ("N", 65536), ("eps", 0.0)]
)
def test_the_ends_of_what_is_possible_are_possible(rms_norm, field, value):
    assert rms_norm.spec({**WORKLOAD, field: value}, SM90).workload[field] == value


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stages": 2}, "schedule"),
        ({"block_m": 0}, "schedule.block_m"),
        ({"block_m": 513}, "schedule.block_m"),
        ({"block_m": 16}, "schedule.block_m"),
        ({"block_m": True}, "schedule.block_m"),
        pytest.param({"block_m": 1.0}, "schedule.block_m"),
        ({"block_m": "1"}, "schedule.block_m"),
        ({"threads": 100}, "schedule.threads"),
        ({"threads": 2048}, "schedule.threads"),
        ({"threads": "128"}, "schedule.threads"),
        ({"threads": None}, "schedule.threads"),
        pytest.param({"threads": 256.0}, "schedule.threads"),
        ({"each": 3}, "schedule.each"),
        ({"prefetch": 1}, "schedule.prefetch"),
        ({"prefetch": "no"}, "schedule.prefetch"),
    ],
    ids=json.dumps,
)
def test_an_impossible_schedule_is_named_with_its_field(rms_norm, changes, field):
    assert rms_norm.spec(WORKLOAD, SM90, SCHEDULE).schedule == SCHEDULE
    with pytest.raises(WorkloadError) as caught:
        rms_norm.spec(WORKLOAD, SM90, {**SCHEDULE, **changes})
    assert caught.value.field == field


@pytest.mark.parametrize("missing", SCHEDULE)
def test_a_schedule_that_lacks_a_field_is_refused(rms_norm, missing):
    schedule = {name: value for name, value in SCHEDULE.items() if name != missing}
    for impossible in (schedule, {}):
        with pytest.raises(WorkloadError, match="it takes block_m, threads, each") as caught:
            rms_norm.spec(WORKLOAD, SM90, impossible)
        assert caught.value.field == "schedule"


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 128},
        {"block_m": 2},
        {"prefetch": True},
        pytest.param({"block_m": 1.0}),
        {"threads": True},
        {"prefetch": 0},
    ],
    ids=json.dumps,
)
def test_the_cpu_takes_its_one_schedule_only(rms_norm, changes):
    assert rms_norm.spec(WORKLOAD, CPU, ONLY) == rms_norm.spec(WORKLOAD, CPU)
    with pytest.raises(WorkloadError) as caught:
        rms_norm.spec(WORKLOAD, CPU, {**ONLY, **changes})
    assert caught.value.field.startswith("schedule")


def test_the_default_schedule_is_one_that_the_check_admits(rms_norm):
    for target in (CPU, SM90):
        for n in (1, 2, 3, 255, 256, 512, 513, 1024, 1025, 4096, 65536):
            made = rms_norm.spec({"M": 1, "N": n}, target)
            assert rms_norm.spec({"M": 1, "N": n}, target, made.schedule) == made


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([1])


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["M", "N", "eps", "dtype"]), VALUES),
    st.none() | st.dictionaries(st.sampled_from(["block_m", "threads"]), VALUES),
    st.sampled_from([CPU, SM90]),
)
def test_any_values_give_a_spec_or_a_workload_error(values, schedule, target):
    try:
        made = operators.get("rms_norm").spec({**WORKLOAD, **values}, target, schedule)
    except WorkloadError:
        return
    assert KernelSpec.from_json(made.to_json()) == made


# --- accepts ---

SCHEDULES = st.dictionaries(
    st.sampled_from(["block_m", "threads", "each", "prefetch", "stages"]), VALUES
)


def test_an_operator_accepts_its_own_specs(rms_norm):
    for target in (CPU, SM90):
        made = rms_norm.spec(WORKLOAD, target)
        assert rms_norm.accepts(made)
        assert rms_norm.accepts(rms_norm.spec({**WORKLOAD, "M": "dynamic"}, target))
        assert rms_norm.accepts(KernelSpec.from_json(made.to_json()))
    for schedule in rms_norm.candidates(rms_norm.workload(**WORKLOAD), SM90):
        assert rms_norm.accepts(rms_norm.spec(WORKLOAD, SM90, schedule))


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": "ops.kernels.rms_norm:other"},
        {"workload": {"M": 128, "N": 4096}},
        {"workload": {**WORKLOAD, "width": 3}},
        {"workload": {**WORKLOAD, "N": 0}},
        {"workload": {**WORKLOAD, "dtype": "bf16"}},  # the spec of a workload is spelt out
        {"workload": {**WORKLOAD, "eps": 0}},
        {"schedule": {}},
        {"schedule": {"stages": 2}},
        {"target": "cpu"},
        {"pass_configs": {"tl.disable_tma_lower": True}},
        {"compile_flags": ["-O1"]},
        {"execution_backend": "cython"},
    ],
    ids=json.dumps,
)
def test_an_operator_does_not_accept_what_it_would_not_ask_for(rms_norm, changes):
    made = rms_norm.spec(WORKLOAD, SM90)
    assert not rms_norm.accepts(KernelSpec.from_json({**made.to_json(), **changes}))


def test_an_operator_does_not_accept_another_ones_spec(rms_norm):
    softmax = operators.get("softmax").spec({"M": 128, "N": 4096}, SM90)
    assert operators.get("softmax").accepts(softmax)
    assert not rms_norm.accepts(softmax)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(operators.installed())),
    st.dictionaries(st.sampled_from(["M", "N", "K", "eps", "dtype", "H", "D"]), VALUES),
    SCHEDULES,
    st.sampled_from([CPU, SM90]),
)
def test_whether_any_spec_is_accepted_is_told_and_never_an_error(name, values, schedule, target):
    operator = operators.get(name)
    known = {"M": 4, "N": 256, "K": 256, "H": 8, "D": 128}
    fields = [field.name for field in dataclasses.fields(operator.workload)]
    made = operator.spec({key: known[key] for key in fields if key in known}, target)
    try:
        spec = KernelSpec(
            made.kernel, {**made.workload, **values}, {**made.schedule, **schedule}, target
        )
    except SpecError:
        return
    assert operator.accepts(spec) in (True, False)
    assert operator.accepts(made)


# --- entries of a shapes.json ---


def asked_for(entry, target):
    """The one spec that a shapes.json of this entry asks for."""
    (wanted,) = shapes.expand(
        shapes.Shapes.model_validate({"version": 1, "workloads": [entry]}), "shapes.json", [target]
    )
    return wanted.spec


@pytest.mark.parametrize("target", [CPU, SM90], ids=str)
@pytest.mark.parametrize("name", sorted(operators.installed()))
def test_a_spec_of_an_operator_has_an_entry_that_asks_for_exactly_it(name, target):
    operator = operators.get(name)
    known = {"M": "dynamic", "N": 256, "K": 256, "H": 8, "D": 128}
    fields = [field.name for field in dataclasses.fields(operator.workload)]
    values = {key: known[key] for key in fields if key in known}
    default = operator.spec(values, target)
    entry = operators.shapes_entry(default)
    assert entry["op"] == name
    assert "schedule" not in entry
    assert asked_for(entry, target) == default
    assert json.loads(json.dumps(entry)) == entry
    for schedule in list(operator.candidates(operator.workload(**values), target))[:3]:
        spec = operator.spec(values, target, schedule)
        assert asked_for(operators.shapes_entry(spec), target) == spec


def test_a_spec_that_no_operator_owns_is_asked_for_by_its_factory(rms_norm):
    owned = rms_norm.spec(WORKLOAD, SM90)
    for changes in (
        {"pass_configs": {"tl.disable_tma_lower": True}},
        {"compile_flags": ["-O3"]},
        {"schedule": {}, "workload": {"N": 4096}},
    ):
        spec = KernelSpec.from_json({**owned.to_json(), **changes})
        entry = operators.shapes_entry(spec)
        assert entry["kernel"] == owned.kernel
        assert asked_for(entry, SM90) == spec


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": {"shape": [1, 2]}},
        {"workload": {"bias": None}},
        {"schedule": {"stages": {"a": 1}}},
        {"execution_backend": "nvrtc"},
    ],
    ids=["list", "null", "object", "backend"],
)
def test_what_a_shapes_json_cannot_say_has_no_entry(rms_norm, changes):
    spec = KernelSpec.from_json({**rms_norm.spec(WORKLOAD, SM90).to_json(), **changes})
    assert operators.shapes_entry(spec) is None
