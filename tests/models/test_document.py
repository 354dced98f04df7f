"""The rows of a model's operators, and the document that they make."""

from __future__ import annotations

import json

import pytest

from tlcache.errors import UsageError
from tlcache.models import document
from tlcache.models.parts import Model, Part
from tlcache.targets import CPU, parse
from tlcache.warm import shapes

BF16 = {"dtype": "bfloat16"}
MODEL = Model(
    "llama",
    "bfloat16",
    (
        Part("input_norm", "rms_norm", {**BF16, "N": 4096, "eps": 1e-5}),
        Part("q_norm", "rms_norm", {**BF16, "N": 128, "eps": 1e-5}, times=32),
        Part("k_norm", "rms_norm", {**BF16, "N": 128, "eps": 1e-5}, times=8),
        Part("q_proj", "gemm", {**BF16, "N": 4096, "K": 4096}),
        Part("o_proj", "gemm", {**BF16, "N": 4096, "K": 4096}),
        Part("expert", "silu_and_mul", {**BF16, "N": 768}, rows="routed"),
        Part("lm_head", "gemm", {**BF16, "N": 32000, "K": 4096}, rows="sequences"),
    ),
    (),
)


def rows(batches=(), prompts=(), **options):
    made = document.make(MODEL, batches, prompts, **options)
    return {"+".join(line.parts): list(line.rows) for line in made.lines}


def test_without_rows_every_operator_gets_the_kernel_for_any_number_of_them():
    assert set(map(tuple, rows().values())) == {("dynamic",)}


def test_decoding_takes_a_row_a_sequence_and_a_prompt_a_row_a_token():
    found = rows((4, 1), (128, 2048))
    assert found["input_norm"] == [1, 4, 128, 512, 2048, 8192, "dynamic"]


def test_rows_that_come_about_in_several_ways_are_asked_for_once():
    assert rows((1, 2, 2), (2, 4))["input_norm"] == [1, 2, 4, 8, "dynamic"]


def test_norms_of_heads_have_a_row_for_each_head_and_equal_shapes_are_one_workload():
    assert rows((1, 2))["q_norm+k_norm"] == [8, 16, 32, 64, "dynamic"]
    assert rows((1, 2))["q_proj+o_proj"] == [1, 2, "dynamic"]


def test_only_the_last_token_of_a_sequence_reaches_the_vocabulary():
    assert rows((1, 4), (128,))["lm_head"] == [1, 4, "dynamic"]


def test_rows_that_the_router_decides_are_never_numbers():
    assert rows((1, 4), (128,), exact=True)["expert"] == ["dynamic"]
    assert rows((1, 4), (128,), exact=True)["input_norm"] == [1, 4, 128, 512]


def test_prompts_alone_come_one_at_a_time():
    assert rows((), (128,))["input_norm"] == [1, 128, "dynamic"]


def test_asking_for_exact_rows_without_any_is_an_error():
    with pytest.raises(UsageError, match="asks for nothing"):
        rows(exact=True)


def test_more_numbers_of_rows_than_anybody_can_mean_are_an_error():
    with pytest.raises(UsageError, match="more than 10,000 numbers of rows"):
        rows(range(1, 1000), range(1, 1000))


def test_the_document_is_one_that_warm_takes_with_a_workload_a_line(tmp_path):
    made = document.make(MODEL, (1, 2), (128,))
    path = tmp_path / "shapes.json"
    path.write_text(made.text)
    assert len(made.text.splitlines()) == len(made.lines) + 5
    loaded = shapes.load(path)
    for target in (parse("sm90"), parse("sm80"), CPU):
        assert len(shapes.expand(loaded, path, [target])) == made.kernels
    (expert,) = [one for one in json.loads(made.text)["workloads"] if one["op"] == "silu_and_mul"]
    assert expert == {"op": "silu_and_mul", "M": "dynamic", "N": 768, "dtype": "bfloat16"}


def test_what_an_operator_refuses_is_left_out_with_its_reason():
    odd = Part("router", "gemm", {**BF16, "N": 60, "K": 2048})
    made = document.make(Model("m", "bfloat16", (odd, *MODEL.parts), ()), (1,), ())
    (reason,) = made.left_out
    assert reason.startswith("router: gemm: N is 60; on CUDA it is a multiple of 8")
    assert not any("router" in line.parts for line in made.lines)
    with pytest.raises(UsageError, match="no operator can run") as caught:
        document.make(Model("m", "bfloat16", (odd,), ()), (1,), ())
    assert "N is 60" in caught.value.hint


def test_a_number_of_rows_that_is_too_large_does_not_take_the_others_along():
    made = document.make(MODEL, (1, 2**24), (2**10,))
    assert list(made.lines[0].rows) == [1, 2**10, 2**24, "dynamic"]
    assert made.left_out[0].startswith("input_norm: rms_norm: M is 17179869184; rows are")
