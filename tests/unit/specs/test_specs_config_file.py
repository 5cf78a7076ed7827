from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from pantheraml import TrainConfig
from pantheraml.base.errors import ConfigError
from pantheraml.specs.config_file import (
    _OTHER_TRAINERS_KEYS,
    all_keys,
    dump_yaml,
    json_schema,
    load_config,
    parse_overrides,
)

MINIMAL = {"model": {"path": "m"}, "data": {"path": "d"}}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def problem(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as err:
        load_config(write(tmp_path, text), parse_overrides(overrides))
    return str(err.value)


HEAD = "model:\n  path: m\ndata:\n  path: d\n"


@pytest.mark.seed("S3-046")
def test_yaml_round_trip(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, HEAD + "train:\n  learning_rate: 1e-4\n  max_steps: 7\n"))
    assert config.train.learning_rate == 1e-4
    assert load_config(write(tmp_path, dump_yaml(config))) == config


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, HEAD + "train: {seed: 1}\n"),
        parse_overrides(["train.seed=2", "method.target_modules=[q_proj, v_proj]"]),
    )
    assert config.train.seed == 2
    assert config.method.target_modules == ["q_proj", "v_proj"]


@pytest.mark.seed("S0-105", "S3-068")
def test_an_unknown_key_names_key_line_and_nearest_name(tmp_path: Path) -> None:
    text = problem(tmp_path, HEAD + "train:\n  seed: 1\n  learning_rat: 3\n")
    assert "`train.learning_rat` is not a known key" in text
    assert "config.yaml, line 7" in text
    assert "Did you mean `train.learning_rate`?" in text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trian: {seed: 1}", "train"),
        ("max_steps: 3", "train.max_steps"),
        ("parallel: {bucket_cap: 3}", "parallel.bucket_cap_mb"),
        ("train: {lora_rank: 3}", None),
        ("train: {lr: 3}", "train.learning_rate"),
        ("num_train_epochs: 3", "train.epochs"),
    ],
)
def test_nearest_names(tmp_path: Path, wrong: str, right: str | None) -> None:
    text = problem(tmp_path, HEAD + wrong + "\n")
    assert (f"Did you mean `{right}`?" in text) if right else ("Did you mean" not in text)


def test_other_trainers_keys_map_to_existing_keys() -> None:
    known = [".".join(key) for key in all_keys()]
    assert set(_OTHER_TRAINERS_KEYS.values()) <= set(known)
    assert not {name.rpartition(".")[2] for name in known} & _OTHER_TRAINERS_KEYS.keys()


def test_a_bad_value_names_key_value_and_line(tmp_path: Path) -> None:
    text = problem(tmp_path, HEAD + "train:\n  max_steps: -1\n  micro_batch_size: many\n")
    assert "`train.max_steps` = -1" in text
    assert "line 6" in text
    assert "`train.micro_batch_size` = 'many'" in text
    assert "2 problems" in text


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.learning_rate=-1", "'auto', or greater than 0"),
        ("train.learning_rate=abc", "'auto', or a valid number"),
        ("train.micro_batch_size=many", "a valid integer, or 'auto'"),
        ("train.epochs=x", "input should be a valid number ("),
        ("method.rank=65537", "less than or equal to 65536"),
    ],
)
def test_every_alternative_of_a_value_is_named(tmp_path: Path, setting: str, says: str) -> None:
    assert says in problem(tmp_path, HEAD, setting)


@pytest.mark.parametrize("key", ["train.max_steps", "train.learning_rate", "method.rank", "parallel.world_size"])
@pytest.mark.parametrize("value", ["yes", "true"])
def test_true_is_no_number(tmp_path: Path, key: str, value: str) -> None:
    """Python takes it for 1, which is a rank, a number of steps and a learning rate."""
    assert f"`{key}` = 'true': input should be" in problem(tmp_path, HEAD, f"{key}={value}")


def test_switches_stay_switches(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, HEAD), parse_overrides(["data.packing=no", "method.rslora=true"]))
    assert (config.data.packing, config.method.rslora) == (False, True)


def test_a_bad_override_names_the_command_line(tmp_path: Path) -> None:
    assert "`train.seed` = 'x'" in problem(tmp_path, HEAD, "train.seed=x")
    assert "(command line)" in problem(tmp_path, HEAD, "train.seed=x")


def test_missing_keys_are_named(tmp_path: Path) -> None:
    assert "`data` is required" in problem(tmp_path, "model: {path: m}\n")
    assert "`model.path` is required" in problem(tmp_path, "model: {}\ndata: {path: d}\n")


def test_yaml_errors_name_the_line(tmp_path: Path) -> None:
    assert "line 2" in problem(tmp_path, "model: {path: m}\n  data: [\n")
    assert "is set twice" in problem(tmp_path, HEAD + "data: {path: e}\n")
    assert "contains no settings" in problem(tmp_path, "")
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("train: {eval_every_steps: 5}", "needs evaluation data"),
        ("checkpoint: {final: best}", "needs evaluation data"),
        ("data: {path: d, eval_path: e, eval_fraction: 0.1}", "both set"),
        ("model: {path: m, init: random}", "needs method.kind=full"),
        ("train: {weights: bf16}", "train.weights=bf16 is for method.kind=full"),
        ("model: {path: m, precision: fp16}\nmethod: {kind: full}\ntrain: {weights: bf16}", "precision is fp16"),
        ("data: {path: d, eval_path: e}\ntrain: {early_stopping_patience: 2}", "needs train.eval_every_steps"),
    ],
)
def test_contradicting_sections_are_refused(tmp_path: Path, extra: str, message: str) -> None:
    values = {**MINIMAL, **yaml.safe_load(extra)}
    assert message in problem(tmp_path, yaml.safe_dump(values))


@pytest.mark.parametrize("setting", ["nonsense", "=3"])
def test_malformed_override_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.field=value"):
        parse_overrides([setting])


def test_every_key_is_described_in_the_schema() -> None:
    schema = json_schema()
    for section in (d for name, d in schema["$defs"].items() if name.endswith(("Config", "Settings"))):
        for name, field in section["properties"].items():
            assert field.get("description"), name


def test_promised_keys_exist() -> None:
    known = {".".join(key) for key in all_keys()}
    promised = """model.path model.precision data.path data.eval_path data.format data.seq_len data.packing method.kind
    method.rank method.alpha method.target_modules train.max_steps train.epochs train.global_batch_size
    train.micro_batch_size train.learning_rate train.warmup_steps train.seed train.activation_checkpointing
    checkpoint.every_steps checkpoint.keep parallel.mode"""
    assert set(promised.split()) <= known


def test_python_uses_the_same_names() -> None:
    config = TrainConfig.model_validate({**MINIMAL, "parallel": {"mode": "distributed", "world_size": 2}})
    assert config.parallel.mode == "distributed"
    assert config.parallel.world_size == 2


def test_an_empty_section_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, HEAD + "train:\n")).train.seed == 0


def test_cross_section_errors_name_the_line(tmp_path: Path) -> None:
    assert "config.yaml, line 6" in problem(tmp_path, HEAD + "train:\n  eval_every_steps: 5\n")


@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_numbers_must_be_finite(tmp_path: Path, value: str) -> None:
    assert "`train.epochs`" in problem(tmp_path, HEAD, f"train.epochs={value}")


def test_control_characters_in_yaml_are_a_config_error(tmp_path: Path) -> None:
    assert "not valid YAML" in problem(tmp_path, HEAD + "# \x01\n")


def nested_aliases(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        (nested_aliases(9), "contains more than 10,000 values"),
        ("model: " + "[" * 200 + "]" * 200 + "\n", "nested more than 32 levels"),
        ("model: " + "[" * 50_000 + "]" * 50_000 + "\n", "nested more than 32 levels"),
        ("model: &a [*a]\n", "nested more than 32 levels"),
        ("#" * (1 << 20) + "\n" + HEAD, "larger than 1 MiB"),
    ],
    ids=["aliases", "deep", "deeper", "endless", "large"],
)
def test_oversized_yaml_is_refused(tmp_path: Path, text: str, bound: str) -> None:
    message = problem(tmp_path, text)
    assert bound in message
    assert len(message) < 500


@pytest.mark.parametrize("value", ["1" + ":1" * 120_000, "7" * 5_000, "0." + "1" * 5_000])
def test_overlong_number_is_refused_quickly(tmp_path: Path, value: str) -> None:
    begin = time.process_time()
    path = tmp_path / "config.yaml"
    path.write_text(f"train: {{seed: {value}}}\n")
    for read in (lambda: load_config(path), lambda: parse_overrides([f"train.seed={value}"])):
        with pytest.raises(ConfigError, match="a number of more than 100 characters"):
            read()
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("value", ["2001-99-99", "!!int x", "!!timestamp x", "!!bool x"])
def test_invalid_value_is_an_error_of_the_file(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"train: {{seed: {value}}}\n")
    with pytest.raises(ConfigError, match="an invalid value") as raised:
        load_config(path)
    assert raised.value.where == str(path)
    assert parse_overrides([f"train.seed={value}"]) == {("train", "seed"): value}, "the key's own check refuses it"


def test_oversized_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested more than 32 levels"):
        parse_overrides(["train.seed=" + "[" * 50_000])


def test_yaml_aliases_are_expanded(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "model: {path: &m m}\ndata: {path: *m}\n")).data.path == "m"


def test_long_values_are_truncated_in_errors(tmp_path: Path) -> None:
    assert len(problem(tmp_path, HEAD + f"train: {{seed: {'x' * 10_000}}}\n")) < 400


def test_value_instead_of_a_section_is_refused(tmp_path: Path) -> None:
    message = problem(tmp_path, "model: {path: m}\ndata: file.jsonl\n")
    assert "`data` is a section, not a value" in message
    assert "line 2" in message
    assert "data: {path: ...}" in message
    assert "DataConfig" not in message
    assert "parallel: {mode: ...}" in problem(tmp_path, HEAD + "parallel: 2\n")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("parallel.batch_shares=2,2,2,15", [2, 2, 2, 15]),
        ("parallel.batch_shares=[2,2,2,15]", [2, 2, 2, 15]),
        ("parallel.batch_shares=adaptive", "adaptive"),
        ("parallel.device_ids=0, 2", [0, 2]),
        ("parallel.restart_on=killed,hung", ("killed", "hung")),
        ("method.target_modules=q_proj,v_proj", ["q_proj", "v_proj"]),
        ("method.target_modules=all-linear", "all-linear"),
    ],
)
def test_comma_separated_lists(tmp_path: Path, setting: str, value: object) -> None:
    config = load_config(write(tmp_path, HEAD), parse_overrides([setting]))
    section, _, name = setting.partition("=")[0].partition(".")
    assert getattr(getattr(config, section), name) == value


def test_seed_out_of_range_is_refused(tmp_path: Path) -> None:
    assert "`train.seed` = 18446744073709551616" in problem(tmp_path, HEAD, "train.seed=18446744073709551616")
