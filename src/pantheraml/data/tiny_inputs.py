"""A Llama of a megabyte with random weights, and data for it: to try an installation, a script or an example.

    model, data = write_tiny_inputs(Path("tiny"))

It takes no network, no torch and less than a second. It has learned nothing; `pantheraml demo` trains a model that has.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pantheraml.data import synthetic

HIDDEN_SIZE, LAYERS, HEADS, LONGEST, VOCABULARY = 64, 2, 4, 2048, 512
EXAMPLES = 64


def write_tiny_inputs(folder: Path) -> tuple[Path, Path]:
    """Return `folder/model` and `folder/data.jsonl` (prompt and completion), made here if they are not there yet.

    Several ranks may call it at once: each makes its own, and the first one's stays.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        _write(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            shutil.rmtree(scratch)
            if not folder.exists():
                raise
    return folder / "model", folder / "data.jsonl"


def _write(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    examples = synthetic.base_examples(EXAMPLES, seed=0)
    synthetic.write_examples(folder / "data.jsonl", examples)
    vocabulary = synthetic.write_tokenizer(model, examples, vocab_size=VOCABULARY)
    synthetic.write_model_config(
        model, vocab_size=vocabulary, hidden_size=HIDDEN_SIZE, layers=LAYERS, heads=HEADS, longest=LONGEST
    )
    _write_random_weights(model)


def _write_random_weights(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    rng = np.random.default_rng(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        attention = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        mlp = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        norms = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in {**attention, **mlp, **norms}.items()}
    weights = {
        f"model.{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.normal(0, config["initializer_range"], shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
