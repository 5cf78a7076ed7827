"""How the server starts: it imports nothing heavy, and its socket answers at once."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from pantheraml.service.serve import bind
from pantheraml.service.settings import Settings


def test_the_service_imports_nothing_heavy() -> None:
    code = (
        "import sys, pantheraml.service, pantheraml.service.serve\n"
        "heavy = {'torch', 'transformers', 'peft', 'pyarrow', 'plotly', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_answers_are_sent_without_delay(tmp_path: Path) -> None:
    """asyncio sets TCP_NODELAY only on sockets that name their protocol; without it each answer took 40 ms more."""
    with bind(Settings(tmp_path, tmp_path, port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
