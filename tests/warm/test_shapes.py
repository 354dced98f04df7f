"""shapes.json: what it expands to, and one error with its path for whatever is wrong with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tlcache
from tlcache.errors import ShapesError, TargetError
from tlcache.spec import KernelSpec
from tlcache.targets import CPU, Target
from tlcache.warm import shapes as module
from tlcache.warm.shapes import expand, json_schema, load, targets

SM90 = Target("sm_90a")
PACKAGE = Path(tlcache.__file__).parent
RMS = {"op": "rms_norm", "M": 1, "N": 64}
FACTORY = {"kernel": "ops.kernels.rms_norm:rms_norm", "args": {"M": 1, "N": 64}}


@pytest.fixture
def wanted(shapes):
    """What workloads expand to, for the CPU unless other targets are chosen."""

    def wanted(*workloads, chosen=(CPU,)):
        path = shapes(*workloads)
        return expand(load(path), path, chosen)

    return wanted


@pytest.fixture
def fault(shapes):
    """The one error of a document, with the file's name cut off."""

    def fault(*workloads, document=None, chosen=(CPU,)):
        path = shapes(*workloads)
        if document is not None:
            path.write_text(json.dumps(document))
        with pytest.raises(ShapesError) as caught:
            expand(load(path), path, chosen)
        start, colon, rest = caught.value.message.partition(": ")
        assert (start, colon) == (str(path), ": ")
        caught.value.said = rest
        return caught.value

    return fault


def values(found, *names):
    return [tuple(one.spec.workload[name] for name in names) for one in found]


# --- expanding ---


def test_a_workload_of_single_values_is_one_kernel(wanted):
    (only,) = wanted({**RMS, "eps": 1e-5, "dtype": "float32"})
    assert only.spec == KernelSpec(
        "ops.kernels.rms_norm:rms_norm",
        {"M": 1, "N": 64, "eps": 1e-5, "dtype": "float32"},
        {"block_m": 1, "threads": 1, "each": 1, "prefetch": False},
        CPU,
    )
    assert (only.where, only.op) == ("workloads[0]", "rms_norm")


def test_a_workload_is_the_product_of_its_lists_in_their_order(wanted):
    found = wanted({"op": "rms_norm", "N": [128, 64], "dtype": ["float32", "float16"], "M": [2, 1]})
    assert values(found, "N", "dtype", "M") == [
        (n, dtype, m) for n in (128, 64) for dtype in ("float32", "float16") for m in (2, 1)
    ]


def test_workloads_come_in_the_documents_order_each_kernel_once(wanted):
    found = wanted(
        {"op": "rms_norm", "M": [4, 2, 4], "N": 64},
        {"op": "rms_norm", "M": [1, 2], "N": 64, "dtype": "bf16"},
        {"op": "rms_norm", "M": 3, "N": 64, "eps": 1e-6},
    )
    assert values(found, "M") == [(4,), (2,), (1,), (3,)]
    assert [one.where for one in found] == [
        "workloads[0]",
        "workloads[0]",
        "workloads[1]",
        "workloads[2]",
    ]


def test_each_chosen_target_has_all_workloads(wanted):
    found = wanted({**RMS, "M": [1, 2]}, chosen=iter([SM90, CPU]))
    assert [(one.spec.target, one.spec.workload["M"]) for one in found] == [
        (SM90, 1),
        (SM90, 2),
        (CPU, 1),
        (CPU, 2),
    ]
    assert wanted(RMS, chosen=[]) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"from": 1, "to": 16, "times": 2}, [1, 2, 4, 8, 16]),
        ({"from": 3, "to": 50, "times": 4}, [3, 12, 48]),
        ({"from": 2, "to": 11, "step": 3}, [2, 5, 8, 11]),
        ({"from": 2, "to": 10, "step": 3}, [2, 5, 8]),
        ({"from": 5, "to": 7}, [5, 6, 7]),
        ({"from": 5, "to": 5, "times": 9}, [5]),
        ([{"from": 1, "to": 4, "times": 2}, "dynamic", 7], [1, 2, 4, "dynamic", 7]),
        ([{"from": 1, "to": 4, "times": 2}, {"from": 3, "to": 4}, 1], [1, 2, 4, 3]),
    ],
    ids=json.dumps,
)
def test_a_range_stands_for_its_values_both_ends_included(wanted, given, expected):
    assert [row[0] for row in values(wanted({**RMS, "M": given}), "M")] == expected


def test_a_schedule_of_ones_own_takes_the_place_of_the_default(wanted):
    schedule = {"block_m": 4, "threads": 128, "each": 1, "prefetch": False}
    (own,) = wanted({**RMS, "schedule": schedule}, chosen=[SM90])
    assert own.spec.schedule == schedule
    assert wanted({**RMS, "schedule": "default"}, chosen=[SM90]) == wanted(RMS, chosen=[SM90])


def test_a_workload_may_name_a_factory(wanted):
    found = wanted(
        {
            "kernel": "ops.kernels.rms_norm:rms_norm",
            "args": {"M": [1, "dynamic"], "N": {"from": 64, "to": 128, "times": 2}, "eps": 0.5},
            "schedule": {"block_m": 1, "threads": 128, "each": 1, "prefetch": False},
            "pass_configs": {"tl.disable_tma_lower": True},
            "compile_flags": ["-O3"],
        },
        chosen=[SM90],
    )
    assert values(found, "M", "N") == [(1, 64), (1, 128), ("dynamic", 64), ("dynamic", 128)]
    assert found[0].spec == KernelSpec(
        "ops.kernels.rms_norm:rms_norm",
        {"M": 1, "N": 64, "eps": 0.5},
        {"block_m": 1, "threads": 128, "each": 1, "prefetch": False},
        SM90,
        pass_configs={"tl.disable_tma_lower": True},
        compile_flags=["-O3"],
    )
    assert (found[0].where, found[0].op) == ("workloads[0]", None)


def test_a_factory_without_arguments_is_one_kernel(wanted):
    (only,) = wanted({"kernel": "ops.kernels.rms_norm:rms_norm"})
    assert (only.spec.workload, only.spec.schedule) == ({}, {})


def test_values_keep_their_types(wanted):
    (only,) = wanted({**FACTORY, "args": {"a": True, "b": 1, "c": 1.0, "d": "1"}})
    assert [type(value) for value in only.spec.workload.values()] == [bool, int, float, str]


def test_a_document_without_workloads_asks_for_nothing(shapes):
    path = shapes(document={"version": 1, "workloads": []})
    assert expand(load(path), path, [CPU]) == []


def test_expanding_imports_neither_torch_nor_tilelang(python, shapes):
    path = shapes(RMS, FACTORY)
    done = python(
        "import sys; from tlcache.targets import CPU; from tlcache.warm import shapes\n"
        "assert len(shapes.expand(shapes.load(sys.argv[1]), sys.argv[1], [CPU])) == 2\n"
        "print(sorted({'torch', 'tilelang', 'tvm', 'tvm_ffi'} & set(sys.modules)))",
        str(path),
    )
    assert (done.code, done.out) == (0, "[]\n"), done.err


# --- a document's own targets ---


def test_a_documents_targets_are_canonical_and_each_once(shapes):
    path = shapes(RMS, targets=["sm90", "h100", "cpu", {"kind": "cuda", "arch": "sm_90"}, "sm80"])
    assert [target.name for target in targets(load(path), path)] == [
        "sm_90a",
        "cpu",
        "sm_90",
        "sm_80",
    ]


def test_a_document_without_targets_has_none(shapes):
    path = shapes(RMS)
    assert targets(load(path), path) == []


def test_an_unknown_target_is_named_with_its_place(shapes):
    path = shapes(RMS, targets=["cpu", "h10"])
    with pytest.raises(TargetError) as caught:
        targets(load(path), path)
    assert caught.value.message == f"{path}: targets[1]: unknown target 'h10'"
    assert "did you mean `h100`?" in caught.value.hint


# --- files that are no documents ---


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent.json", "cannot be read: no such file or directory"),
        ("file/absent.json", "cannot be read: not a directory"),
        (".", "cannot be read: is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_said(tmp_path, name, says):
    (tmp_path / "file").write_text("")
    path = tmp_path / name
    with pytest.raises(ShapesError, match=re.escape(f"{path} {says}")) as caught:
        load(path)
    assert "`--shapes` takes a file" in caught.value.hint


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is not JSON: Expecting value"),
        (b'{"version": 1,}', "is not JSON: "),
        (b"version: 1\n", "is not JSON: "),
        (b'{"version": 1} {"version": 1}', "is not JSON: Extra data"),
        (b"[" * 100_000, "is not JSON: "),
        (b"1" * 5000, "is not JSON: "),
        (b'\xef\xbb\xbf{"version": 1}', "is not JSON: "),
        (b'{"version": "\xff"}', "is not UTF-8 text"),
    ],
    ids=lambda part: repr(part[:20]),
)
def test_a_file_that_is_no_json_is_said(tmp_path, data, says):
    path = tmp_path / "shapes.json"
    path.write_bytes(data)
    with pytest.raises(ShapesError, match=re.escape(f"{path} {says}")):
        load(path)


# --- documents that say something wrong ---


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([], "the document is []; "),
        (5, "the document is 5; "),
        ({"workloads": []}, "version is missing"),
        ({"version": 1}, "workloads is missing"),
        ({"version": 2, "workloads": []}, "version is 2; "),
        ({"version": "1", "workloads": []}, 'version is "1"; '),
        ({"version": True, "workloads": []}, "version is true; "),
        ({"version": 1, "workloads": {}}, "workloads is {}; "),
        ({"version": 1, "workloads": [], "wordloads": []}, "wordloads is not a field"),
        ({"version": 1, "workloads": [], "targets": "cpu"}, 'targets is "cpu"; '),
        ({"version": 1, "workloads": [], "targets": ["cpu", 90]}, "targets[1] is 90; "),
        ({"version": 1, "workloads": [RMS, 5]}, "workloads[1] is 5; "),
        ({"version": 1, "workloads": [RMS, {}]}, "workloads[1].op is missing"),
        ({"version": 1, "workloads": [{"op": 5}]}, "workloads[0].op is 5; "),
        ({"version": 1, "workloads": [{"op": "rms_norm", **FACTORY}]}, "workloads[0].op is not a"),
        ({"version": 1, "workloads": [{**RMS, "M": None}]}, "workloads[0].M is null; "),
        ({"version": 1, "workloads": [{**RMS, "M": {}}]}, "workloads[0].M is {}; "),
        ({"version": 1, "workloads": [{**RMS, "M": [1, [2]]}]}, "workloads[0].M"),
        ({"version": 1, "workloads": [{**RMS, "factory": None}]}, "workloads[0].factory is null; "),
        ({"version": 1, "workloads": [{**RMS, "schedule": 5}]}, "workloads[0].schedule is 5; "),
        (
            {"version": 1, "workloads": [{**RMS, "schedule": "best"}]},
            'workloads[0].schedule is "best"; ',
        ),
        ({"version": 1, "workloads": [{"kernel": 5}]}, "workloads[0].kernel is 5; "),
        ({"version": 1, "workloads": [{**FACTORY, "args": 5}]}, "workloads[0].args is 5; "),
        (
            {"version": 1, "workloads": [{**FACTORY, "args": {"M": {}}}]},
            "workloads[0].args.M is {}; ",
        ),
        (
            {"version": 1, "workloads": [{**FACTORY, "args": {"op": {"$nothing": 1}}}]},
            'workloads[0].args.op is {"$nothing": 1}; ',
        ),
        ({"version": 1, "workloads": [{**FACTORY, "M": 1}]}, "workloads[0].M is not a field"),
        (
            {"version": 1, "workloads": [{**FACTORY, "compile_flags": "-O3"}]},
            'workloads[0].compile_flags is "-O3"; ',
        ),
        (
            {"version": 1, "workloads": [{**FACTORY, "compile_flags": [3]}]},
            "workloads[0].compile_flags[0] is 3; ",
        ),
    ],
    ids=lambda part: json.dumps(part)[:60],
)
def test_a_document_that_breaks_the_schema_is_said_with_its_path(fault, document, says):
    error = fault(document=document)
    assert error.said.startswith(says)
    assert "\n" not in error.message
    assert "pydantic" not in error.message


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"from": 4, "to": 1}, "a range goes upwards, and this one from 4 to 1"),
        ({"from": 0, "to": 8, "times": 2}, "a range with times starts at 1 or more, not at 0"),
        ({"from": 1, "to": 8, "times": 2, "step": 1}, "a range has times or step, not both"),
        ({"from": 1, "to": 8, "times": 1}, ""),
        ({"from": 1, "to": 8, "step": 0}, ""),
        ({"from": 1, "to": 8, "by": 2}, ""),
        ({"from": 1}, ""),
        ({"from": 1.5, "to": 8}, ""),
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("listed", [False, True])
def test_a_range_that_is_none_is_said_with_its_path(fault, given, says, listed):
    error = fault(RMS, {**RMS, "M": [3, given] if listed else given})
    assert error.said.startswith("workloads[1].M")
    assert says in error.said


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ({**RMS, "op": "rmsnorm"}, "workloads[1].op: unknown operator 'rmsnorm'"),
        ({**RMS, "K": 1}, "workloads[1].K: rms_norm has no field 'K'"),
        ({"op": "rms_norm", "M": 1}, "workloads[1].N: rms_norm needs N"),
        ({**RMS, "N": -64}, "workloads[1].N: N is -64; "),
        ({**RMS, "N": [64, 0]}, "workloads[1].N: N is 0; "),
        ({**RMS, "M": 1.0}, "workloads[1].M: M is 1.0; "),
        ({**RMS, "M": True}, "workloads[1].M: M is True; "),
        ({**RMS, "M": {"from": -1, "to": 1}}, "workloads[1].M: M is -1; "),
        ({**RMS, "eps": -1}, "workloads[1].eps: eps is -1; "),
        ({**RMS, "eps": float("nan")}, "workloads[1].eps: eps is nan; "),
        ({**RMS, "dtype": "int8"}, "workloads[1].dtype: dtype is 'int8'; "),
        ({**RMS, "schedule": {"block_m": 1}}, "workloads[1].schedule: "),
        (
            {**RMS, "schedule": {"block_m": 1, "threads": 7, "each": 1, "prefetch": False}},
            "workloads[1].schedule.threads: threads is 7; ",
        ),
        ({**RMS, "M": []}, "workloads[1].M is an empty list"),
        ({**FACTORY, "args": {"M": []}}, "workloads[1].args.M is an empty list"),
        ({"kernel": "nowhere"}, "workloads[1].kernel: the kernel 'nowhere' is not an import path"),
        ({"kernel": "nowhere.at:all"}, "workloads[1].kernel: no module named 'nowhere.at'"),
        ({"kernel": "ops.kernels.rms_norm:norm"}, "workloads[1].kernel: the module"),
        ({**FACTORY, "args": {"x": float("inf")}}, "workloads[1]: the spec of"),
    ],
    ids=lambda part: json.dumps(part)[:70],
)
def test_a_workload_that_cannot_be_is_said_with_its_path(fault, workload, says):
    assert fault({**RMS, "M": 9}, workload, chosen=[SM90]).said.startswith(says)


def test_a_hint_goes_with_the_error(fault):
    assert "did you mean `rms_norm`?" in fault({**RMS, "op": "rmsnorm"}).hint
    assert "did you mean `dtype`?" in fault({**RMS, "type": "float32"}).hint
    assert "package.module:factory" in fault({"kernel": "nowhere"}).hint


def test_too_many_kernels_are_refused_before_any_is_expanded(fault):
    error = fault(
        RMS, {**RMS, "M": {"from": 1, "to": 1000}, "N": {"from": 1, "to": 1000}}, chosen=[CPU, SM90]
    )
    assert error.said.startswith("workloads[1] asks for 2,000,002 kernels in all; at most 100,000")
    assert '"times": 2' in error.hint
    error = fault(RMS, {**RMS, "M": list(range(module.MOST))})
    assert error.said.startswith("workloads[1] asks for 100,001 kernels")


@pytest.mark.parametrize("end", [2**62, 2**63, 2**64, 10**30])
@pytest.mark.parametrize("more", [{}, {"step": 1}], ids=["plain", "step"])
def test_a_range_of_any_length_is_too_many_kernels(fault, end, more):
    assert "asks for" in fault({**RMS, "M": {"from": 1, "to": end, **more}}).said


def test_a_range_by_factors_may_reach_any_number(fault):
    assert "M is 2147483648" in fault({**RMS, "M": {"from": 2**31, "to": 2**70, "times": 2}}).said


# --- the published schema ---


def test_the_published_schema_is_the_models_own():
    published = json.loads((PACKAGE / "warm/shapes.schema.json").read_text())
    assert published == json_schema()
    jsonschema.Draft202012Validator.check_schema(published)


EXAMPLES = [
    path
    for path in sorted((Path(__file__).parents[2] / "examples").rglob("*.json"))
    if path.name != "dashboard.json"
]


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_obeys_the_schema_and_expands(path):
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert expand(load(path), path, [CPU, SM90])
    assert all(isinstance(target, Target) for target in targets(load(path), path))


@pytest.mark.parametrize(
    "document",
    [
        {"version": 1},
        {"version": 2, "workloads": []},
        {"version": 1, "workloads": [{}]},
        {"version": 1, "workloads": [{**RMS, "M": None}]},
        {"version": 1, "workloads": [{**FACTORY, "M": 1}]},
        {"version": 1, "workloads": [{**RMS, "M": {"from": 1}}]},
        {"version": 1, "workloads": [], "wordloads": []},
    ],
    ids=json.dumps,
)
def test_what_the_schema_refuses_is_refused_when_it_is_loaded(fault, document):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert fault(document=document)


# --- any document ---

NUMBERS = st.integers(-2, 40) | st.sampled_from([2**31, 2**64, 10**30, -(10**30), 10**400])
SCALARS = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["dynamic", "float32", "cpu", "sm90", "auto", "default", "op", "\ud800"])
)
NAMES = st.sampled_from(
    ["version", "workloads", "targets", "op", "kernel", "args", "schedule", "pass_configs", "M"]
) | st.sampled_from(["N", "from", "to", "step", "times", "model_config", "__class__", "json"])
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(), inner),
    max_leaves=8,
)
RANGES = st.fixed_dictionaries(
    {"from": NUMBERS, "to": NUMBERS}, optional={"times": NUMBERS, "step": NUMBERS}
)
FIELDS = SCALARS | RANGES | st.lists(SCALARS | RANGES, max_size=3)
OPS = st.fixed_dictionaries(
    {"op": st.just("rms_norm") | SCALARS},
    optional={
        "M": FIELDS,
        "N": FIELDS,
        "eps": FIELDS,
        "dtype": FIELDS,
        "schedule": ANYTHING,
        "factory": ANYTHING,
    },
)
FACTORIES = st.fixed_dictionaries(
    {"kernel": st.just("ops.kernels.rms_norm:rms_norm") | SCALARS},
    optional={
        "args": st.dictionaries(NAMES | st.text(), FIELDS, max_size=3) | ANYTHING,
        "schedule": ANYTHING,
        "pass_configs": ANYTHING,
        "compile_flags": ANYTHING,
    },
)
DOCUMENTS = ANYTHING | st.fixed_dictionaries(
    {"version": st.just(1), "workloads": st.lists(OPS | FACTORIES | ANYTHING, max_size=3)},
    optional={"targets": st.lists(SCALARS | ANYTHING, max_size=2)},
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(DOCUMENTS)
@example({"version": 1, "workloads": [RMS, FACTORY]})
def test_any_document_expands_or_is_one_error_that_names_its_file(tmp_path, document):
    path = tmp_path / "any.json"
    path.write_text(json.dumps(document))
    try:
        read = load(path)
        found = expand(read, path, [CPU])
        targets(read, path)
    except (ShapesError, TargetError) as error:
        assert error.message.startswith(str(path))
        assert str(error)
        return
    specs = [one.spec for one in found]
    assert len(set(specs)) == len(specs)
    for one in found:
        assert one.spec.target == CPU
        assert re.fullmatch(r"workloads\[\d+\]", one.where)
        assert KernelSpec.from_json(one.spec.to_json()) == one.spec


@pytest.mark.parametrize("depth", [50, 500, 900, 980])
def test_a_document_of_any_depth_is_one_error_that_names_its_file(tmp_path, depth):
    path = tmp_path / "deep.json"
    for text in (
        "[" * depth + "]" * depth,
        '{"version":1,"workloads":[{"op":"rms_norm","M":' + "[" * depth + "]" * depth + "}]}",
        '{"version":1,"workloads":[],"targets":[{"kind":"llvm","x":'
        + "[" * depth
        + "]" * depth
        + "}]}",
    ):
        path.write_text(text)
        try:
            read = load(path)
            expand(read, path, [CPU])
            targets(read, path)
        except (ShapesError, TargetError) as error:
            assert str(path) in error.message


def test_a_factory_may_be_given_none_and_arguments_that_json_has_no_form_for(wanted):
    args = {"M": None, "dtype": {"$torch": "bfloat16"}, "shape": {"$tuple": [1, {"$list": [2]}]}}
    (one,) = wanted({**FACTORY, "args": args, "schedule": {"threads": None}})
    assert one.spec.to_json()["workload"] == args
    assert str(one.spec).endswith("M=null shape=(1,[2]) bf16 threads=null cpu")


def test_a_list_of_such_arguments_is_expanded(wanted):
    args = {"M": [None, {"$tuple": [1]}, {"from": 1, "to": 2}]}
    found = [one.spec.to_json()["workload"]["M"] for one in wanted({**FACTORY, "args": args})]
    assert found == [None, {"$tuple": [1]}, 1, 2]
