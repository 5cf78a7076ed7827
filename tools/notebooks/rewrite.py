"""Changes to a notebook's code before it runs: the import, the device, and how much is computed.

    import unsloth                     import pantheraml as unsloth; also from unsloth.x import y
    from vllm import SamplingParams    from pantheraml import SamplingParams, unless vLLM is installed
    .to("cuda"), .cuda(), torch.cuda   the CPU; torch.cuda.* answers like a GPU of 80 GiB
    SFTConfig(...) and the like        max_steps=2, logging_steps=1, use_cpu=True
    GRPOTrainer(reward_funcs=)         and a reward that differs between answers: those of a random model earn the same,
                                       which leaves no gradient
    "https://.../photo.jpg", "x.mp3"   a small picture, a second of silence
    max_new_tokens, max_tokens         8 tokens; max_completion_length: 12, and none of these answers is masked as cut
    num_proc                           one process
    if False: model.save_pretrained...(...)   done, if it writes to disk in a format that is made here
    assert library.__version__ == ...  dropped: versions are those of this environment
    subprocess of nvidia-smi and pip   dropped

Nothing else is changed: what the notebook passes to the loaders, trainers and savers is what they get.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import zlib

CUDA = "_notebook_cuda"
CAP = "_notebook_cap"
REWARD = "_notebook_reward"
SAVE = "_notebook_save"
PICTURE = "_notebook_picture"
SOUND = "_notebook_sound"
_DOWNLOADS = {
    PICTURE: re.compile(r"^https?://\S+\.(jpe?g|png|webp)$", re.IGNORECASE),
    SOUND: re.compile(r"^\S+\.(mp3|wav|flac)$", re.IGNORECASE),
}
CAPPED = {
    "max_new_tokens": 8,
    "max_tokens": 8,
    "max_completion_length": 12,
    "num_generations": 4,
    "gradient_accumulation_steps": 2,
    "save_steps": 2,
}
ONE_PROCESS = ("num_proc", "dataset_num_proc", "dataloader_num_workers")
_PRODUCT = "pantheraml"
CONFIG = {"max_steps": 2, "logging_steps": 1, "use_cpu": True}
"""Arguments of every training config."""


def rewrite(code: str) -> ast.Module:
    """Return the changed code; raises SyntaxError if it is no Python."""
    tree = _Rewriter().visit(ast.parse(code))
    ast.fix_missing_locations(tree)
    return tree


class _Rewriter(ast.NodeTransformer):
    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            if alias.name == "unsloth":
                alias.name, alias.asname = _PRODUCT, alias.asname or "unsloth"
            elif alias.name.startswith("unsloth."):
                alias.name = alias.name.replace("unsloth", _PRODUCT, 1)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.module == "unsloth" or (node.module or "").startswith("unsloth."):
            node.module = node.module.replace("unsloth", _PRODUCT, 1)
        elif node.module == "vllm" and [alias.name for alias in node.names] == ["SamplingParams"] and not _has("vllm"):
            node.module = _PRODUCT
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant) and node.test.value is False:
            saves = [_save(statement.value) for statement in node.body if _saves(statement)]
            if saves:
                return ast.copy_location(ast.If(ast.Constant(True), saves, []), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str) and (node.value == "cuda" or node.value.startswith("cuda:")):
            return ast.copy_location(ast.Constant("cpu"), node)
        for name, address in _DOWNLOADS.items():
            if isinstance(node.value, str) and address.match(node.value):
                return ast.copy_location(ast.Name(name, ast.Load()), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(CUDA, ast.Load()), node)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if any(isinstance(part, ast.Attribute) and part.attr == "__version__" for part in ast.walk(node.test)):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr = "cpu"
        for keyword in node.keywords:
            if keyword.arg in CAPPED:
                keyword.value = _capped(keyword.value, CAPPED[keyword.arg])
            elif keyword.arg == "mask_truncated_completions":
                keyword.value = ast.Constant(False)
            elif keyword.arg in ONE_PROCESS:
                keyword.value = ast.Constant(0 if keyword.arg == "dataloader_num_workers" else None)
            elif keyword.arg == "reward_funcs":
                rewards = ast.Starred(keyword.value, ast.Load())
                keyword.value = ast.List([rewards, ast.Name(REWARD, ast.Load())], ast.Load())
        if _is_training_config(node.func):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in CONFIG]
            node.keywords += [ast.keyword(name, ast.Constant(value)) for name, value in CONFIG.items()]
        return node


_WRITTEN = ("q8_0", "f16", "bf16", "f32")
"""GGUF kinds that need no other program."""


def _saves(statement: ast.stmt) -> bool:
    """Whether the statement writes a model or tokenizer to disk, in a format that needs no other program."""
    call = getattr(statement, "value", None)
    name = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
    if name not in ("save_pretrained", "save_pretrained_merged", "save_pretrained_gguf"):
        return False
    kinds = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "quantization_method"]
    return all(kind.strip("'\"").lower() in _WRITTEN for kind in kinds)


def _save(call: ast.expr) -> ast.stmt:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Expr(
        ast.Call(ast.Name(SAVE, ast.Load()), [ast.Lambda(nothing, call), ast.Constant(ast.unparse(call))], [])
    )


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _capped(value: ast.expr, most: int) -> ast.Call:
    return ast.Call(ast.Name(CAP, ast.Load()), [value, ast.Constant(most)], [])


def _is_training_config(function: ast.expr) -> bool:
    """SFTConfig, GRPOConfig, TrainingArguments and the like."""
    name = getattr(function, "id", getattr(function, "attr", ""))
    return name.endswith("TrainingArguments") or name in {
        "SFTConfig", "GRPOConfig", "DPOConfig", "ORPOConfig", "KTOConfig", "RLOOConfig", "RewardConfig", "CPOConfig",
    }  # fmt: skip


def cap(value: object, most: int) -> object:
    """Return the smaller one; a value that is no whole number (None, a share of the steps) stays."""
    return min(value, most) if type(value) is int else value


def varied_reward(completions: list[object], **_: object) -> list[float]:
    """Return rewards between 0 and 1 that depend on the answers alone."""
    return [zlib.crc32(str(completion).encode()) % 100 / 100 for completion in completions]
