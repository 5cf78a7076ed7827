"""`python -m pantheraml.worker.torch_facts`: import torch, look for GPUs, and print what it finds as JSON.

For `pantheraml doctor`, which imports no torch itself. A torch that cannot be imported ends this process, and its
traceback says why.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from pantheraml.specs.tasks import TorchFacts


def find() -> TorchFacts:
    problem = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count()
        if count:
            try:
                torch.zeros(1, device="cuda").add_(1).item()
            except RuntimeError as err:
                problem = str(err).splitlines()[0]
    if problem is None and caught and not count:
        problem = str(caught[0].message).splitlines()[0]
    cuda: Any = torch.cuda  # `nccl.version` has no annotations
    nccl = ".".join(map(str, cuda.nccl.version())) if torch.version.cuda is not None else None
    return TorchFacts(version=torch.__version__, cuda=torch.version.cuda, nccl=nccl, gpus=count, problem=problem)


if __name__ == "__main__":
    print(json.dumps(find().model_dump()))
