"""`tlcache shapes`: from a config to a document that `tlcache warm` takes."""

from __future__ import annotations

import json

import pytest

LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "vocab_size": 128256, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    return path


def test_the_document_goes_to_stdout_and_warm_takes_it(tlcache, config, tmp_path):
    ran = tlcache("shapes", "--from-hf", config, "--batch", "1,2,4", "--prompt", "128,2048")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["version"] == 1
    (tmp_path / "shapes.json").write_text(ran.out)
    checked = tlcache("warm", "--shapes", "shapes.json", "--target", "sm90", "--check", "--json")
    assert checked.code == 1, checked.err
    assert checked.json["summary"]["missing"] == 9 * 10 + 4


def test_a_file_gets_the_document_and_the_screen_what_it_is_for(tlcache, config, tmp_path):
    ran = tlcache("shapes", "--from-hf", config, "-o", "shapes.json", "--tp", 2)
    assert ran.code == 0, ran.err
    assert "rope\tH=16 D=128 bf16\tdynamic\tq_rope" in ran.out.splitlines()
    assert "10 kernels a target for llama, in shapes.json" in ran.err
    assert "hint: `tlcache warm --shapes shapes.json --target sm90`" in ran.err
    piped = tlcache("shapes", "--from-hf", config.parent, "--tp", 2)
    assert piped.out == (tmp_path / "shapes.json").read_text()


def test_what_is_left_out_is_told_and_not_written(tlcache, config):
    config.write_text(json.dumps({**LLAMA_3_8B, "torch_dtype": "float32"}))
    ran = tlcache("shapes", "--from-hf", config)
    assert ran.code == 0
    assert {one["op"] for one in ran.json["workloads"]} == {
        "rms_norm", "fused_add_rms_norm", "rope", "silu_and_mul",
    }  # fmt: skip
    assert "left out: lm_head: gemm: dtype is 'float32'" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "1,two"], "--batch has 'two'; it takes whole numbers"),
        (["--prompt", "0"], "--prompt has '0'; it takes whole numbers"),
        (["--batch", "9" * 5000], "it takes whole numbers"),
        (["--batch", "0000000000001"], "it takes whole numbers"),
        (["--exact"], "`--exact` without rows asks for nothing"),
        (["--tp", "3"], "num_attention_heads is 32; 3 ranks (`--tp`) do not divide 32"),
        (["-o", "/proc/shapes.json"], "/proc/shapes.json cannot be written"),
    ],
)
def test_an_option_that_makes_no_sense_is_wrong_usage(tlcache, config, arguments, said):
    ran = tlcache("shapes", "--from-hf", config, *arguments)
    assert ran.code == 2
    assert said in ran.err
    assert "\nhint: " in ran.err
    assert ran.out == ""


def test_a_hub_name_says_how_to_get_the_config_since_nothing_is_downloaded(tlcache):
    ran = tlcache("shapes", "--from-hf", "Qwen/Qwen3-8B")
    assert ran.code == 2
    assert "hint: if it is a model on the hub: `hf download Qwen/Qwen3-8B config.json" in ran.err


def test_a_terminal_shows_a_table(terminal, config):
    lines = terminal(
        "shapes", "--from-hf", str(config), "-o", "shapes.json", width=100, NO_COLOR="1"
    )
    assert lines[0].split() == ["OPERATOR", "SHAPE", "ROWS", "(M)", "WHERE"]
    assert all(len(line) <= 100 for line in lines[:11])
