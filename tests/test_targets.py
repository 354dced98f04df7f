"""Targets: many spellings in, one canonical form out, and it is TileLang's own."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlcache import targets
from tlcache.errors import TargetError
from tlcache.targets import CPU, Target, for_capability, matches, note, parse

CAPABILITIES = {
    (8, 0): "sm_80",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}

SPELLINGS = {
    "sm80": "sm_80",
    "sm_80": "sm_80",
    "SM80": "sm_80",
    "8.0": "sm_80",
    "a100": "sm_80",
    "A100": "sm_80",
    "NVIDIA A100": "sm_80",
    "sm89": "sm_89",
    "l40s": "sm_89",
    "sm90": "sm_90a",
    "sm_90": "sm_90a",
    "sm90a": "sm_90a",
    "sm_90a": "sm_90a",
    " sm_90a ": "sm_90a",
    "9.0": "sm_90a",
    "h100": "sm_90a",
    "h200": "sm_90a",
    "H200": "sm_90a",
    "b200": "sm_100a",
    "10.0": "sm_100a",
    "sm100": "sm_100a",
    "sm_100f": "sm_100f",
    "b300": "sm_103a",
    "12.0": "sm_120a",
    "sm120": "sm_120a",
    "cpu": "cpu",
    "CPU": "cpu",
    "c": "cpu",
}


def test_a_capabilitys_target_has_the_suffix_from_nine_up():
    assert {pair: for_capability(*pair).name for pair in CAPABILITIES} == CAPABILITIES


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS.items())
def test_a_spelling_means_what_auto_detection_says_of_its_gpus(spelling, name):
    assert parse(spelling) == Target(name)


@pytest.mark.parametrize("as_text", [False, True], ids=["mapping", "json"])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"kind": "cuda", "arch": "sm_90"}, "sm_90"),
        ({"kind": "cuda", "arch": "sm_90a"}, "sm_90a"),
        ({"arch": "sm_80", "kind": "cuda"}, "sm_80"),
        ({"kind": "c"}, "cpu"),
        (
            {"kind": "cuda", "code": "compute_90a", "arch": "sm_90a"},
            '{"arch":"sm_90a","code":"compute_90a","kind":"cuda"}',
        ),
        ({"kind": "llvm", "mcpu": "native"}, '{"kind":"llvm","mcpu":"native"}'),
    ],
)
def test_a_dict_is_taken_to_the_letter(config, name, as_text):
    target = parse(json.dumps(config) if as_text else config)
    assert target.name == name
    assert target.config == config


@pytest.mark.parametrize("name", [*CAPABILITIES.values(), "sm_90", "cpu"])
def test_a_canonical_name_and_its_config_say_the_same(name):
    target = Target(name)
    assert parse(target.config) == target
    assert parse(json.dumps(target.config)) == target
    assert (target.kind, target.is_cuda) == (("c", False) if name == "cpu" else ("cuda", True))
    assert target.execution_backend == ("cython" if name == "cpu" else "tvm_ffi")
    assert str(target) == name


def test_the_kind_of_a_dict_with_more_attributes_is_its_own():
    fat = parse({"kind": "cuda", "arch": "sm_90a", "code": "compute_90a"})
    assert (fat.kind, fat.is_cuda, fat.execution_backend) == ("cuda", True, "tvm_ffi")
    tuned = parse({"kind": "c", "mcpu": "native"})
    assert (tuned.kind, tuned.is_cuda, tuned.execution_backend) == ("c", False, "cython")
    assert tuned != CPU


@pytest.mark.parametrize("spelling", ["auto", "cuda", "native", {"kind": "cuda"}])
def test_asking_for_this_machines_gpu_where_there_is_none_says_so(spelling):
    try:
        found = targets.detect()
    except TargetError:
        with pytest.raises(TargetError, match="no GPU is visible here") as caught:
            parse(spelling)
        assert "--target" in caught.value.hint
    else:
        pytest.skip(f"there is a GPU here: {found}")


@pytest.mark.gpu
@pytest.mark.parametrize("spelling", ["auto", "cuda", "native", {"kind": "cuda"}])
def test_asking_for_this_machines_gpu_gives_what_torch_says_of_it(spelling):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    assert parse(spelling) == for_capability(*torch.cuda.get_device_capability(0))


@pytest.mark.parametrize(
    ("spelling", "near"),
    [("h10", "h100"), ("smm90", "sm90"), ("cppu", "cpu"), ("b20", "b200"), ("atuo", "auto")],
)
def test_a_slip_of_the_pen_gets_a_suggestion(spelling, near):
    with pytest.raises(TargetError) as caught:
        parse(spelling)
    assert repr(spelling) in caught.value.message
    assert f"did you mean `{near}`?" in caught.value.hint


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("", "unknown target ''"),
        ("quantum", "unknown target 'quantum'"),
        ("sm_9", "unknown target 'sm_9'"),
        ("sm_90b", "unknown target 'sm_90b'"),
        ("9", "unknown target '9'"),
        ("{", "looks like JSON"),
        ('{"kind": "cuda", "arch"}', "looks like JSON"),
        ("{}", "no kind"),
        ('{"arch": "sm_90"}', "no kind"),
        ('{"kind": 5}', "no kind"),
        ('{"kind": "cuda", "arch": 90}', "not an exact SM token"),
        ('{"kind": "cuda", "arch": "90"}', "not an exact SM token"),
        ('{"kind": "cuda", "arch": "sm_90b", "code": "x"}', "not an exact SM token"),
        ({"arch": {1, 2}}, "no kind"),
        ({"kind": "llvm", "mattr": {1, 2}}, "not JSON"),
        ({"kind": "llvm", 1: 2}, "not JSON"),
        ({"kind": "llvm", "opt": float("nan")}, "not JSON"),
        ('{"kind": "llvm", "opt": Infinity}', "not JSON"),
    ],
)
def test_what_is_no_target_is_a_target_error_that_says_why(spelling, says):
    with pytest.raises(TargetError, match=says) as caught:
        parse(spelling)
    assert caught.value.hint or says == "not JSON"


@pytest.mark.parametrize("depth", [10, 100_000])
def test_json_of_any_depth_is_a_target_or_a_target_error(depth):
    text = '{"kind":' + '{"a":' * depth + "1" + "}" * depth + "}"
    with pytest.raises(TargetError):
        parse(text)


@pytest.mark.parametrize("spelling", ["sm_٩٠", "sm_٩٠a", "٩.٠", {"kind": "cuda", "arch": "sm_٩٠a"}])
def test_digits_of_other_scripts_are_no_capability(spelling):
    with pytest.raises(TargetError):
        parse(spelling)


def _accepted(spelling):
    """Parse it, and check what every target that comes out must be."""
    try:
        target = parse(spelling)
    except TargetError:
        return
    assert parse(target.config) == target
    assert target.name.isascii()
    json.loads(json.dumps(target.config), parse_constant=pytest.fail)


@settings(max_examples=100, deadline=None)
@given(st.text() | st.from_regex(r"\s*(sm_?)?[\w.]{1,4}[af]?\s*") | st.from_regex(r"\{.*"))
def test_any_text_is_a_target_or_a_target_error(text):
    _accepted(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["cuda", "c", "llvm"]) | JSON,
        "arch": st.sampled_from(["sm_90", "sm_90a", "sm_120"]) | JSON,
        "code": JSON,
        "host": JSON,
    },
)


@settings(max_examples=100, deadline=None)
@given(CONFIGS)
def test_any_dict_is_a_target_or_a_target_error_as_a_mapping_and_as_json(config):
    _accepted(config)
    _accepted(json.dumps(config))


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("sm90", {"sm_90", "sm_90a"}),
        ("SM90", {"sm_90", "sm_90a"}),
        ("h100", {"sm_90", "sm_90a"}),
        ("9.0", {"sm_90", "sm_90a"}),
        ("sm_90", {"sm_90"}),
        ("sm_90a", {"sm_90a"}),
        ("sm90a", {"sm_90a"}),
        ("sm80", {"sm_80"}),
        ("a100", {"sm_80"}),
        ("sm100", {"sm_100a", "sm_100f"}),
        ("sm100f", {"sm_100f"}),
        ("cpu", {"cpu"}),
        ("c", {"cpu"}),
        ('{"kind": "cuda", "arch": "sm_90"}', {"sm_90"}),
        (
            '{"kind": "cuda", "arch": "sm_90a", "code": "X"}',
            {'{"arch":"sm_90a","code":"X","kind":"cuda"}'},
        ),
    ],
)
def test_a_filter_selects_its_family_or_only_itself(pattern, selected):
    there = ["sm_80", "sm_90", "sm_90a", "sm_100a", "sm_100f", "sm_103a", "cpu"]
    there += ['{"arch":"sm_90a","code":"X","kind":"cuda"}', '{"kind":"c","mcpu":"native"}']
    assert {name for name in there if matches(pattern, name)} == selected


def test_a_filter_that_names_nothing_is_a_target_error():
    with pytest.raises(TargetError, match="unknown target 'h10'"):
        matches("h10", "sm_90a")


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("sm90", "Target sm90 means sm_90a, which is what TileLang detects on this GPU family."),
        ("h100", "Target h100 means sm_90a, which is what TileLang detects on this GPU family."),
        ("sm_90a", None),
        ("sm80", None),
        ("cpu", None),
        ('{"kind": "cuda", "arch": "sm_90a"}', None),
        ({"kind": "cuda", "arch": "sm_90a"}, None),
    ],
)
def test_a_note_is_due_where_more_was_understood_than_written(spelling, says):
    assert note(spelling, parse(spelling)) == says


TILELANG = """
import json, sys
import torch
from tilelang.backend.target import determine_target
from tlcache.targets import CPU, for_capability

# Only the GPU that is not here is made up; the detection is TileLang's own.
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
report = []
for pair in json.loads(sys.argv[1]):
    torch.cuda.get_device_capability = lambda device=None: tuple(pair)
    ours = str(determine_target(for_capability(*pair).config, return_object=True))
    theirs = [str(determine_target(t, return_object=True)) for t in ("auto", "cuda")]
    report.append([pair, ours, theirs])
print("RESULT " + json.dumps({
    "cuda": report,
    "cpu": [str(determine_target(t, return_object=True)) for t in (CPU.config, "c")],
}))
"""


@pytest.mark.nvcc
def test_our_targets_are_those_of_tilelangs_auto_detection(python):
    done = python(TILELANG, json.dumps(list(CAPABILITIES)))
    assert done.code == 0, done.err
    report = json.loads(done.out.rpartition("RESULT ")[2])
    assert len(report["cuda"]) == len(CAPABILITIES)
    for pair, ours, theirs in report["cuda"]:
        assert theirs == [ours, ours], pair
        assert f'"{CAPABILITIES[tuple(pair)]}"' in ours
    ours, theirs = report["cpu"]
    assert ours == theirs
