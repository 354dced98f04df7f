"""The operators of public models, by the numbers of their config.json; and hostile configs."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tlcache.errors import ModelConfigError, TlcacheError
from tlcache.models import document, parts

LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "vocab_size": 128256, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_2_5_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "vocab_size": 152064, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "vocab_size": 151936, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "vocab_size": 151936, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "num_experts": 128, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
QWEN_1_5_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
    "vocab_size": 151936, "hidden_act": "silu", "torch_dtype": "bfloat16", "num_experts": 60,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "vocab_size": 32000, "hidden_act": "silu", "torch_dtype": "bfloat16", "head_dim": None,
}  # fmt: skip
MISTRAL_NEMO = {
    **MISTRAL_7B, "hidden_size": 5120, "head_dim": 128, "vocab_size": 131072,
}  # fmt: skip
MIXTRAL_8X7B = {**MISTRAL_7B, "model_type": "mixtral", "num_local_experts": 8}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "scoring_func": "sigmoid", "rms_norm_eps": 1e-6,
    "vocab_size": 129280, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "scoring_func": "softmax", "rms_norm_eps": 1e-6,
    "vocab_size": 102400, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip

# What each part is, as `N`, `N K` or `H D`; and how many rows a token is, where that is not one.
EXPECTED = {
    "Llama-3-8B": (LLAMA_3_8B, {
        "input_norm": (4096,), "residual_norm": (4096,), "q_proj+k_proj+v_proj": (6144, 4096),
        "q_rope": (32, 128), "k_rope": (8, 128), "o_proj": (4096, 4096),
        "gate_proj+up_proj": (28672, 4096), "activation": (14336,), "down_proj": (4096, 14336),
        "lm_head": (128256, 4096),
    }),
    "Qwen2.5-7B": (QWEN_2_5_7B, {
        "input_norm": (3584,), "residual_norm": (3584,), "q_proj+k_proj+v_proj": (4608, 3584),
        "q_rope": (28, 128), "k_rope": (4, 128), "o_proj": (3584, 3584),
        "gate_proj+up_proj": (37888, 3584), "activation": (18944,), "down_proj": (3584, 18944),
        "lm_head": (152064, 3584),
    }),
    "Qwen3-8B": (QWEN_3_8B, {
        "input_norm": (4096,), "residual_norm": (4096,), "q_proj+k_proj+v_proj": (6144, 4096),
        "q_norm": (128, "x32"), "k_norm": (128, "x8"), "q_rope": (32, 128), "k_rope": (8, 128),
        "o_proj": (4096, 4096), "gate_proj+up_proj": (24576, 4096), "activation": (12288,),
        "down_proj": (4096, 12288), "lm_head": (151936, 4096),
    }),
    "Qwen3-30B-A3B": (QWEN_3_30B_A3B, {
        "input_norm": (2048,), "residual_norm": (2048,), "q_proj+k_proj+v_proj": (5120, 2048),
        "q_norm": (128, "x32"), "k_norm": (128, "x4"), "q_rope": (32, 128), "k_rope": (4, 128),
        "o_proj": (2048, 4096), "router": (128, 2048), "router_softmax": (128,),
        "expert_gate_proj+expert_up_proj": (1536, 2048), "expert_activation": (768,),
        "expert_down_proj": (2048, 768), "lm_head": (151936, 2048),
    }),
    "Qwen1.5-MoE-A2.7B": (QWEN_1_5_MOE, {
        "input_norm": (2048,), "residual_norm": (2048,), "q_proj+k_proj+v_proj": (6144, 2048),
        "q_rope": (16, 128), "k_rope": (16, 128), "o_proj": (2048, 2048), "router": (60, 2048),
        "router_softmax": (60,), "shared_gate_proj+shared_up_proj": (11264, 2048),
        "shared_activation": (5632,), "shared_down_proj": (2048, 5632),
        "expert_gate_proj+expert_up_proj": (2816, 2048), "expert_activation": (1408,),
        "expert_down_proj": (2048, 1408), "lm_head": (151936, 2048),
    }),
    "Mistral-7B": (MISTRAL_7B, {
        "input_norm": (4096,), "residual_norm": (4096,), "q_proj+k_proj+v_proj": (6144, 4096),
        "q_rope": (32, 128), "k_rope": (8, 128), "o_proj": (4096, 4096),
        "gate_proj+up_proj": (28672, 4096), "activation": (14336,), "down_proj": (4096, 14336),
        "lm_head": (32000, 4096),
    }),
    "Mistral-Nemo": (MISTRAL_NEMO, {
        "input_norm": (5120,), "residual_norm": (5120,), "q_proj+k_proj+v_proj": (6144, 5120),
        "q_rope": (32, 128), "k_rope": (8, 128), "o_proj": (5120, 4096),
        "gate_proj+up_proj": (28672, 5120), "activation": (14336,), "down_proj": (5120, 14336),
        "lm_head": (131072, 5120),
    }),
    "Mixtral-8x7B": (MIXTRAL_8X7B, {
        "input_norm": (4096,), "residual_norm": (4096,), "q_proj+k_proj+v_proj": (6144, 4096),
        "q_rope": (32, 128), "k_rope": (8, 128), "o_proj": (4096, 4096), "router": (8, 4096),
        "router_softmax": (8,), "expert_gate_proj+expert_up_proj": (28672, 4096),
        "expert_activation": (14336,), "expert_down_proj": (4096, 14336),
        "lm_head": (32000, 4096),
    }),
    "DeepSeek-V3": (DEEPSEEK_V3, {
        "input_norm": (7168,), "residual_norm": (7168,), "q_a_proj+kv_a_proj": (2112, 7168),
        "q_a_norm": (1536,), "q_b_proj": (24576, 1536), "kv_a_norm": (512,),
        "kv_b_proj": (32768, 512), "q_rope": (128, 64), "k_rope": (1, 64),
        "o_proj": (7168, 16384), "gate_proj+up_proj": (36864, 7168), "activation": (18432,),
        "down_proj": (7168, 18432), "router": (256, 7168),
        "shared_gate_proj+shared_up_proj": (4096, 7168), "shared_activation": (2048,),
        "shared_down_proj": (7168, 2048), "expert_gate_proj+expert_up_proj": (4096, 7168),
        "expert_activation": (2048,), "expert_down_proj": (7168, 2048),
        "lm_head": (129280, 7168),
    }),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, {
        "input_norm": (2048,), "residual_norm": (2048,), "q_proj": (3072, 2048),
        "kv_a_proj": (576, 2048), "kv_a_norm": (512,), "kv_b_proj": (4096, 512),
        "q_rope": (16, 64), "k_rope": (1, 64), "o_proj": (2048, 2048),
        "gate_proj+up_proj": (21888, 2048), "activation": (10944,), "down_proj": (2048, 10944),
        "router": (64, 2048), "router_softmax": (64,),
        "shared_gate_proj+shared_up_proj": (5632, 2048), "shared_activation": (2816,),
        "shared_down_proj": (2048, 2816), "expert_gate_proj+expert_up_proj": (2816, 2048),
        "expert_activation": (1408,), "expert_down_proj": (2048, 1408),
        "lm_head": (102400, 2048),
    }),
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    """Write a config.json, and return its path."""

    def write(fields, **changes):
        path = tmp_path / "config.json"
        kept = {**fields, **changes}
        path.write_text(json.dumps({k: v for k, v in kept.items() if v is not ...}))
        return path

    return write


def shape(part):
    sizes = tuple(part.values[name] for name in ("N", "K", "H", "D") if name in part.values)
    return (*sizes, f"x{part.times}") if part.times > 1 else sizes


def shapes_of(path, **options):
    return {part.what: shape(part) for part in parts.read(path, **options).parts}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_parts_of_a_public_model_have_its_shapes(config, name):
    fields, expected = EXPECTED[name]
    model = parts.read(config(fields))
    assert {part.what: shape(part) for part in model.parts} == expected
    assert [part.what for part in model.parts] == list(expected)
    assert model.dtype == "bfloat16"
    assert {part.values.get("eps") for part in model.parts} == {None, fields["rms_norm_eps"]}
    assert {part.rows for part in model.parts if part.what.startswith("expert")} <= {"routed"}
    assert {part.rows for part in model.parts if part.what == "lm_head"} == {"sequences"}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_public_model_makes_a_document_for_any_usual_number_of_ranks(config, name, ranks):
    fields, expected = EXPECTED[name]
    if any(fields[field] % ranks for field in ("num_attention_heads", "intermediate_size")):
        with pytest.raises(ModelConfigError, match=rf"{ranks} ranks \(`--tp`\) do not divide"):
            parts.read(config(fields), ranks=ranks)
        return
    model = parts.read(config(fields), ranks=ranks)
    assert [part.what for part in model.parts] == list(expected)
    made = document.make(model, (1, 2, 4), (128, 2048))
    assert made.lines


def test_ranks_split_heads_and_widths_and_share_what_is_replicated(config):
    assert shapes_of(config(LLAMA_3_8B), ranks=8) == {
        "input_norm": (4096,), "residual_norm": (4096,), "q_proj+k_proj+v_proj": (768, 4096),
        "q_rope": (4, 128), "k_rope": (1, 128), "o_proj": (4096, 512),
        "gate_proj+up_proj": (3584, 4096), "activation": (1792,), "down_proj": (4096, 1792),
        "lm_head": (16032, 4096),
    }  # fmt: skip
    latent = shapes_of(config(DEEPSEEK_V3), ranks=8)
    assert latent["q_a_proj+kv_a_proj"] == (2112, 7168)
    assert (latent["q_b_proj"], latent["kv_b_proj"]) == ((3072, 1536), (4096, 512))
    assert (latent["q_rope"], latent["k_rope"], latent["o_proj"]) == (
        (16, 64), (1, 64), (7168, 2048),
    )  # fmt: skip


def test_heads_of_keys_that_are_fewer_than_the_ranks_are_replicated(config):
    split = shapes_of(config(LLAMA_3_8B), ranks=16)
    assert split["k_rope"] == (1, 128)
    assert split["q_proj+k_proj+v_proj"] == (2 * 128 + 2 * 128, 4096)


def test_projections_may_be_separate_or_left_out(config):
    apart = shapes_of(config(LLAMA_3_8B), projections="separate")
    assert apart["q_proj"] == (4096, 4096)
    assert apart["k_proj"] == apart["v_proj"] == (1024, 4096)
    assert apart["gate_proj"] == apart["up_proj"] == (14336, 4096)
    found = parts.read(config(LLAMA_3_8B), projections="none").parts
    assert {part.op for part in found} == {"rms_norm", "fused_add_rms_norm", "rope", "silu_and_mul"}


def test_the_rotation_of_deepseek_is_by_pairs_and_of_the_others_by_halves(config):
    def pairs(fields, **changes):
        found = parts.read(config(fields, **changes)).parts
        return {part.values.get("interleaved", False) for part in found if part.op == "rope"}

    assert pairs(DEEPSEEK_V3) == {True}
    assert pairs(DEEPSEEK_V3, rope_interleave=False) == {False}
    assert pairs(LLAMA_3_8B) == {False}


def test_the_router_of_deepseek_v3_takes_no_softmax_where_the_config_says_nothing(config):
    assert "router_softmax" not in shapes_of(config(DEEPSEEK_V3, scoring_func=...))
    assert "router_softmax" in shapes_of(config(DEEPSEEK_V2_LITE, scoring_func=...))


def test_layers_without_experts_in_a_model_that_has_them_are_seen(config):
    assert "activation" in shapes_of(config(QWEN_3_30B_A3B, mlp_only_layers=[0]))
    assert "activation" in shapes_of(config(QWEN_3_30B_A3B, decoder_sparse_step=2))
    assert "activation" not in shapes_of(config(DEEPSEEK_V3, first_k_dense_replace=0))


def test_a_model_that_sees_is_read_through_its_text_config(config):
    whole = {"model_type": "mistral3", "text_config": MISTRAL_7B, "vision_config": {}}
    assert shapes_of(config(whole)) == EXPECTED["Mistral-7B"][1]
    broken = {**whole, "text_config": {**MISTRAL_7B, "hidden_size": "wide"}}
    with pytest.raises(ModelConfigError, match=r'config.json: text_config.hidden_size is "wide"; '):
        parts.read(config(broken))


def test_a_directory_that_has_a_config_is_as_good_as_the_config(config):
    path = config(LLAMA_3_8B)
    assert parts.read(path.parent) == parts.read(path)


def test_the_dtype_is_the_configs_or_the_callers_or_bfloat16_with_a_note(config):
    assert parts.read(config(LLAMA_3_8B, torch_dtype="float16")).dtype == "float16"
    newer = config(LLAMA_3_8B, torch_dtype=..., dtype="float16")
    assert parts.read(newer).dtype == "float16"
    assert parts.read(newer, dtype="float32").dtype == "float32"
    silent = parts.read(config(LLAMA_3_8B, torch_dtype=...))
    assert silent.dtype == "bfloat16"
    assert "names no dtype" in silent.notes[0]


def test_what_a_person_should_know_is_noted_once(config):
    (note,) = parts.read(config(DEEPSEEK_V3)).notes
    assert "quantized" in note
    assert parts.read(config(DEEPSEEK_V3), projections="none").notes == ()
    (note,) = parts.read(config(MIXTRAL_8X7B, hidden_act="gelu_new")).notes
    assert note == "hidden_act is 'gelu_new', for which there is no operator"


def test_a_bias_that_no_operator_adds_is_noted(config):
    said = ("q, k and v have a bias, which gemm does not add",)
    assert parts.read(config(QWEN_2_5_7B)).notes == said
    assert parts.read(config(LLAMA_3_8B, attention_bias=True)).notes == said
    assert parts.read(config(QWEN_2_5_7B), projections="none").notes == ()
    assert parts.read(config(QWEN_3_8B, attention_bias=False)).notes == ()


def test_part_of_a_head_may_be_rotated(config):
    half = shapes_of(config(LLAMA_3_8B, partial_rotary_factor=0.5))
    assert half["q_rope"] == (32, 64)


# --- what is wrong ---

WRONG = [
    ({"hidden_size": ...}, "hidden_size is missing; it is a whole number from 1 to 65536"),
    ({"hidden_size": None}, "hidden_size is null; it is a whole number"),
    ({"hidden_size": "4096"}, 'hidden_size is "4096"; it is a whole number'),
    ({"hidden_size": 4096.0}, "hidden_size is 4096.0; it is a whole number"),
    ({"hidden_size": True}, "hidden_size is true; it is a whole number"),
    ({"hidden_size": -1}, "hidden_size is -1; it is a whole number"),
    ({"hidden_size": 10**9}, "hidden_size is 1000000000; it is a whole number"),
    ({"hidden_size": 4100}, "hidden_size is 4100; num_attention_heads, 32, divides it"),
    ({"hidden_size": {"a": [1] * 99}}, r'hidden_size is \{"a": .*\.\.\.; it is a whole number'),
    ({"num_attention_heads": 0}, "num_attention_heads is 0; it is a whole number from 1 to 1024"),
    ({"num_key_value_heads": 7}, "num_key_value_heads is 7; it divides num_attention_heads, 32"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; it is a number above 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; it is a number above 0"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity; it is a number above 0"),
    ({"intermediate_size": []}, r"intermediate_size is \[\]; it is a whole number"),
    ({"vocab_size": ...}, "vocab_size is missing"),
    ({"torch_dtype": "int8"}, 'torch_dtype is "int8"; known are bfloat16'),
    ({"torch_dtype": ["bfloat16"]}, r'torch_dtype is \["bfloat16"\]; known are'),
    ({"model_type": "gpt2"}, 'model_type is "gpt2"; known are llama, mistral'),
    ({"model_type": ...}, "model_type is missing; known are llama"),
    ({"model_type": ["llama"]}, r'model_type is \["llama"\]; known are llama'),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_a_field_that_is_wrong_is_named_with_the_file_and_its_value(config, changes, said):
    path = config(LLAMA_3_8B, **changes)
    with pytest.raises(ModelConfigError, match=said) as caught:
        parts.read(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert caught.value.hint


@pytest.mark.parametrize(
    "field", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
              "moe_intermediate_size"]
)  # fmt: skip
def test_a_field_that_only_deepseek_has_is_missed_by_name(config, field):
    with pytest.raises(ModelConfigError, match=f"{field} is missing"):
        parts.read(config(DEEPSEEK_V3, **{field: ...}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b" " * (16 * 1024 * 1024 + 1), "has more than 16 MiB"),
    ],
    ids=["empty", "no text", "a list", "deep", "a long number", "large"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelConfigError, match=said):
        parts.read(path)


def test_a_path_that_is_not_there_says_so_and_a_hub_name_says_how_to_get_it(tmp_path):
    with pytest.raises(ModelConfigError, match=r"there is no .*nothing") as caught:
        parts.read(tmp_path / "nothing")
    assert "`--from-hf` takes" in caught.value.hint
    with pytest.raises(ModelConfigError, match="nothing is downloaded here") as caught:
        parts.read("mistralai/Mistral-7B-v0.3")
    assert "`hf download mistralai/Mistral-7B-v0.3 config.json" in caught.value.hint
    with pytest.raises(ModelConfigError, match=r"there is no .*config\.json"):
        parts.read(tmp_path)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2**40), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.none(), max_size=1),
)  # fmt: skip
FIELDS = sorted(set(DEEPSEEK_V3) | set(QWEN_1_5_MOE) | {"partial_rotary_factor", "dtype"})


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(base=LLAMA_3_8B, changes={"partial_rotary_factor": 2**-8}, ranks=1)
@given(
    base=st.sampled_from([fields for fields, _ in EXPECTED.values()]),
    changes=st.dictionaries(st.sampled_from(FIELDS), SCALARS, max_size=4),
    ranks=st.integers(1, 9),
)
def test_whatever_a_config_says_it_is_a_model_or_a_clear_error(config, base, changes, ranks):
    try:
        model = parts.read(config(base, **changes), ranks=ranks)
        made = document.make(model, (1, 3), (7,))
    except TlcacheError as error:
        assert error.exit_code == 2
        assert error.hint
    else:
        assert made.lines
        for part in model.parts:
            assert all(size >= 1 for size in part.values.values() if type(size) is int)
