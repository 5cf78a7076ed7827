"""`python -m pantheraml.worker.entry chat DEVICE PRECISION [MEMORY_FRACTION]`: the chat worker, over its parent's
pipes. It exits when its input is closed, whatever it is doing. What libraries print goes to stderr, not into the
answers.
"""

from __future__ import annotations

import io
import os
import sys
import threading

import torch
from transformers.utils.logging import disable_progress_bar

from pantheraml.base import env, log
from pantheraml.base.private import private_files
from pantheraml.launch.local import die_with_parent
from pantheraml.planner.precision import TORCH_NAMES, parse_precision
from pantheraml.specs.chat import ChatReply
from pantheraml.worker.chat import ChatWorker, Inbox


def main() -> int:
    device, precision = torch.device(sys.argv[1]), parse_precision(sys.argv[2])
    assert precision is not None
    die_with_parent()
    if len(sys.argv) > 3:  # jobs share the GPU
        torch.cuda.set_per_process_memory_fraction(float(sys.argv[3]))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    log.start(debug=env.debug_requested())
    disable_progress_bar()
    writing = threading.Lock()

    def send(reply: ChatReply) -> None:
        with writing:
            answers.write(reply.model_dump_json() + "\n")
            answers.flush()

    lines = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", newline="\n")
    inbox = Inbox(lines, on_end=lambda: os._exit(0))
    with private_files():
        ChatWorker(inbox, send, dtype=getattr(torch, TORCH_NAMES[precision]), device=device).run()
    return 0
