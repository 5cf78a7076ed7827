"""A folder that looks like the hub's download cache, with tiny random models under the names that notebooks ask for.

`HF_HUB_CACHE` points to it and `HF_HUB_OFFLINE` is set, so that every library finds models as if they had been
downloaded; no loading code is replaced. A model is built once per family and linked to each of its names.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from tools.notebooks.families import Family, chat_template, family_of

REVISION = "0" * 40
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_OWN = re.compile(r"^(HF_USERNAME|your_name|repo_id|hf)/")  # where a notebook would push to
_NF4 = re.compile(r"bnb-4bit", re.IGNORECASE)
_WORDS = 768
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_CORPUS = """Below is an instruction that describes a task, paired with an input that provides further context.
Write a response that appropriately completes the request. What is the sum of these numbers? Think about the problem
and provide your working out. Place it between the tags. Then, provide your solution. Continue the sequence: 1, 1, 2,
3, 5, 8, 13, 21. Write the LaTeX representation for this image. You are a helpful assistant. The cat crosses the bridge,
reads a letter, counts the stars and waits for rain. def function(board): return [row for row in board if row]
"""


def hub_names(code: str) -> list[str]:
    """Return the string constants of `code` that look like names of models we know."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return []
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(
        text for text in texts if _HUB_NAME.match(text) and not _OWN.match(text) and family_of(text) is not None
    )


class LocalHub:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._built = folder / "built"

    @property
    def cache(self) -> Path:
        return self.folder / "hub"

    def has(self, name: str) -> bool:
        return self._snapshot(name).exists()

    def _snapshot(self, name: str) -> Path:
        return self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / REVISION

    def provide(self, name: str) -> None:
        """Make the model `name` loadable, as its family and its quantization have it."""
        family = family_of(name)
        assert family is not None
        snapshot = self._snapshot(name)
        source = self._model(family, name)
        snapshot.mkdir(parents=True)
        for file in source.iterdir():
            os.link(file, snapshot / file.name)
        references = snapshot.parent.parent / "refs"
        references.mkdir()
        (references / "main").write_text(REVISION)

    def _model(self, family: Family, name: str) -> Path:
        nf4 = bool(_NF4.search(name))
        identity = json.dumps([family.model_type, family.eos, family.bos, str(family.turns), family.sizes], default=str)
        folder = self._built / f"{family.model_type}-{abs(hash_text(identity)):x}{'-nf4' if nf4 else ''}"
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            build_model(family, partial)
            if nf4:
                quantize_nf4(partial)
            partial.rename(folder)
        return folder


def hash_text(text: str) -> int:
    import zlib

    return zlib.crc32(text.encode())


def build_tokenizer(family: Family) -> Any:
    """Return a byte-level BPE tokenizer with the family's special tokens and chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_WORDS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([_CORPUS], trainer)
    named = {"bos_token": family.bos, "eos_token": family.eos, "pad_token": family.pad}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=[token for token in family.special if token not in named.values()],
        **{name: token for name, token in named.items() if token is not None},
    )
    if family.turns is not None:
        tokenizer.chat_template = chat_template(family.turns)
    _prepend_bos(backend, tokenizer)
    return tokenizer


def _prepend_bos(backend: Any, tokenizer: Any) -> None:
    """Start every text with the bos token, as tokenizers of Llama, Gemma and Mistral do."""
    from tokenizers import processors

    if tokenizer.bos_token is not None:
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
        )


def build_model(family: Family, folder: Path) -> None:
    """Write a random model of the family to `folder`, with its tokenizer or processor."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    tokenizer = build_tokenizer(family)
    ids = {
        "vocab_size": -(-len(tokenizer) // 8) * 8, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    if family.config_only:
        tokenizer.save_pretrained(folder)
        AutoConfig.for_model(family.model_type).save_pretrained(folder)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family.processor is None:
            config = AutoConfig.for_model(family.model_type, **{**_COMMON, **ids, **family.sizes})
            model_class = AutoModelForMaskedLM if family.encoder else AutoModelForCausalLM
            model = model_class.from_config(config, dtype=torch.bfloat16)
            tokenizer.save_pretrained(folder)
        else:
            from tools.notebooks.multimodal import build_multimodal

            model, processor = build_multimodal(family, tokenizer, {**_COMMON, **ids})
            processor.save_pretrained(folder)
        model.save_pretrained(folder)


def quantize_nf4(folder: Path) -> None:
    """Rewrite the linear layers of a model's decoder in bitsandbytes' nf4 format."""
    from safetensors.torch import load_file, save_file

    from pantheraml.models.quantize.checkpoint_formats import nf4_checkpoint_tensors

    weights = load_file(folder / "model.safetensors")
    changed: dict[str, Any] = {}
    for name, weight in weights.items():
        layer, _, last = name.rpartition(".")
        if last == "weight" and weight.ndim == 2 and layer.endswith("_proj") and "vision" not in layer:
            parts = nf4_checkpoint_tensors(_to_nf4(weight), weight.dtype)
            changed |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
        else:
            changed[name] = weight
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _to_nf4(weight: Any) -> Any:
    from pantheraml.kernels.nf4.format import BLOCK, NF4Weight, blocks_of, nearest_codes, storable_scales

    blocks = blocks_of(weight.flatten().float(), BLOCK)
    scales = storable_scales(blocks.abs().amax(dim=1))
    codes = nearest_codes(blocks, scales.values()).flatten()[: weight.numel()].view(weight.shape)
    return NF4Weight.from_codes(codes, scales)
