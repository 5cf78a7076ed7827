"""Packages that notebooks install and that are not here, as far as their code touches them.

Only what does not belong to training: display in a notebook, a version comparison, the text of a book.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.notebooks import rows


class _Displayed:
    """IPython.display.Markdown and the like."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


class _Book:
    """Answer of `requests.get` for the plain text of a book; other addresses are out of reach."""

    def __init__(self, url: str, **_: Any) -> None:
        if not url.endswith(".txt.utf-8"):
            raise ConnectionError(f"no network: {url}")
        self.text = " ".join(rows.sentence(number) for number in range(rows.ROWS))


def notebook_cuda() -> types.SimpleNamespace:
    """What code reads of `torch.cuda`: a GPU of 80 GiB with nothing on it."""
    zero = lambda *_, **__: 0  # noqa: E731
    properties = types.SimpleNamespace(name="CPU", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=1)
    return types.SimpleNamespace(
        get_device_properties=lambda *_: properties, max_memory_reserved=zero, memory_reserved=zero,
        memory_allocated=zero, max_memory_allocated=zero, empty_cache=zero, synchronize=zero, manual_seed_all=zero,
        reset_peak_memory_stats=zero, ipc_collect=zero, manual_seed=zero, is_available=lambda: True,
        device_count=lambda: 1, get_device_capability=lambda *_: (9, 0), is_bf16_supported=lambda *_: True,
        get_device_name=lambda *_: "CPU", current_device=zero, mem_get_info=lambda *_: (80 * 2**30, 80 * 2**30),
    )  # fmt: skip


def picture() -> Any:
    """Return the image that stands for those that notebooks download."""
    from PIL import Image

    return Image.new("RGB", (56, 56), (90, 140, 60))


def sound() -> Any:
    """Return the recording that stands for those that notebooks download: a second at 16 kHz."""
    import numpy as np

    return np.zeros(16000, dtype=np.float32)


def install() -> None:
    """Put the stand-ins in place; in the process of one notebook."""
    import datasets
    import huggingface_hub
    import requests

    datasets.load_dataset = rows.load_dataset
    datasets.Dataset.cast_column = _cast_column(datasets.Dataset.cast_column)
    huggingface_hub.snapshot_download = _snapshot_download(huggingface_hub.snapshot_download)
    requests.get = _Book
    display = _module("IPython.display", display=lambda *_, **__: None, clear_output=lambda *_, **__: None)
    for name in ("Markdown", "Math", "Latex", "Audio", "Image", "HTML", "Code"):
        setattr(display, name, type(name, (_Displayed,), {}))
    _module("IPython", display=display, get_ipython=lambda: None)
    from packaging.version import Version

    _module("unsloth_zoo")
    _module("unsloth_zoo.utils", Version=lambda name: Version(_version(name)))
    _module("google.colab", drive=None, userdata=types.SimpleNamespace(get=lambda _: ""))


def _cast_column(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Leave recordings as they are: the synthetic ones need no decoding."""

    def cast_column(self: Any, column: str, feature: Any) -> Any:
        return self if type(feature).__name__ == "Audio" else cast(self, column, feature)

    return cast_column


def _snapshot_download(download: Callable[..., str]) -> Callable[..., str]:
    """Leave a folder without files where a notebook copies a model into one: only the loader's arguments matter."""

    def snapshot_download(repo_id: str, *arguments: Any, local_dir: str | None = None, **options: Any) -> str:
        if local_dir is None:
            return download(repo_id, *arguments, **options)
        Path(local_dir).mkdir(exist_ok=True)
        return local_dir

    return snapshot_download


def define_torchvision_ops() -> None:
    """Declare two operators that torchvision registers, if its compiled part does not load.

    That is the case for its CUDA build beside a CPU build of torch; image processors need its Python part only.
    """
    import torch

    try:
        import torchvision
    except ImportError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        import torchvision  # noqa: F401


_KEPT: list[Any] = []
"""A library's operators live as long as it does."""


def _version(name: str) -> str:
    import importlib.metadata

    return name if name[:1].isdigit() else importlib.metadata.version(name)


def _module(name: str, **content: Any) -> types.ModuleType:
    try:
        __import__(name)
    except ImportError:
        module = types.ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, module)
    return sys.modules[name]
