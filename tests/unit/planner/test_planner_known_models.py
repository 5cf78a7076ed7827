from __future__ import annotations

import pytest

from pantheraml.planner.known_models import _SAME_SIZES, known_config, known_names, nearest_name
from pantheraml.planner.model_shapes import shapes_of_config

PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-nemo": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "ministral-8b": 8_019_808_256,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "smollm3-3b": 3_075_098_624,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-coder-32b": 32_763_876_352,
    "deepseek-r1-distill-llama-8b": 8_030_261_248,
    "phi-3.5-mini": 3_821_079_552,
}
"""As their model cards and weight files have them."""


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_sizes_are_those_of_the_published_weights(name: str, parameters: int) -> None:
    config = known_config(name)
    assert config is not None
    assert shapes_of_config(config).parameters == parameters


def test_every_model_is_checked() -> None:
    same = {"llama-3-8b", "llama-3-70b", "llama-3.3-70b", "mistral-7b-v0.2", *_SAME_SIZES}  # sizes of a model above
    assert set(known_names()) - same == set(PARAMETERS) - _SAME_SIZES.keys()
    assert all(name in PARAMETERS or name == "llama-3.3-70b" for name in _SAME_SIZES.values())


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("microsoft/Phi-3.5-mini-instruct", "phi-3-mini-4k"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("google/gemma-3-27b-pt", "gemma-3-27b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"),
    ],
)
def test_names_of_the_hub(name: str, known: str) -> None:
    assert known_config(name) == known_config(known) is not None


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-Coder-4B", "someone/llama-3.1-8b-fp8", "gpt2", "", "/", "llama", "google/gemma-3n-e4b-it"]
)
def test_other_names_are_not_taken_for_them(name: str) -> None:
    assert known_config(name) is None


def test_a_near_name_is_found() -> None:
    assert nearest_name("meta-llama/Llama-3.1-9B") == "llama-3.1-8b"
    assert nearest_name("x") is None
