"""Allow-list of the environment variables that a worker inherits.

A worker reads models and data that may come from untrusted sources. It gets the variables that its libraries need, and
no secrets except the tokens for the model hub and for this run. Metric sinks, which need API keys, run in the parent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NAMES = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "TERM", "COLUMNS", "TZ", "LANG", "LANGUAGE",
    "TMPDIR", "TMP", "TEMP", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CC", "CXX",
    "http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "PANTHERAML_RUN_TOKEN",
))  # fmt: skip

PREFIXES = (
    "LC_", "XDG_", "NIX_", "DYLD_", "MALLOC_", "JE_", "ARROW_", "PYTHON", "COV_", "COVERAGE_", "PYTEST_",
    "PANTHERAML_", "UNSLOTH_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_",
    "BNB_", "BITSANDBYTES_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_",
    "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NVTE_", "NVSHMEM_", "HIP_", "HSA_", "ROCR_", "NCCL_", "RCCL_", "GLOO_",
    "UCX_", "FI_", "SLURM_",
)  # fmt: skip

SECRET = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|JWT|DATABASE_URL)($|_)")
"""Names to drop although their prefix is allowed, such as NVIDIA_API_KEY, SLURM_JWT and PANTHERAML_DATABASE_URL."""


def is_for_workers(name: str, extra: Sequence[str]) -> bool:
    """Return True if a worker may see the variable. `extra`: names that the user allows; a trailing * is a wildcard."""
    if name in NAMES or any(name == one or (one.endswith("*") and name.startswith(one[:-1])) for one in extra):
        return True
    return name.startswith(PREFIXES) and SECRET.search(name) is None
