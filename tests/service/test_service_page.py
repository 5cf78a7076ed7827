"""docs/service.md, executed: the server is started as the page says, and its blocks run against it."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import child_environment
from pantheraml.cli.main import parse
from pantheraml.service.schemas.fine_tuning import OwnSettings
from tests import toy
from tests.service.conftest import Server
from tests.service.test_service_webhooks import Receiver

PAGE = (Path(__file__).parents[2] / "docs/service.md").read_text()


def blocks(kind: str) -> list[str]:
    """Code blocks of the page."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.extended
def test_every_block_runs(own_server: Callable[..., Server], tmp_path: Path) -> None:
    installing, *shell = blocks("bash")
    programs = [block for block in blocks("python") if block.startswith(("import", "from"))]
    assert len(programs) == len(blocks("python")) - 1, "one goes on with the client of another: see below"
    started = parse(shlex.split(installing.splitlines()[-1])[1:])
    assert (started.models_dir, started.data_dir) == ("models", "service-data")
    server = own_server(data=tmp_path / started.data_dir)
    toy.write_jsonl(tmp_path / "train.jsonl", toy.arithmetic(24))
    scripts = Path(sys.executable).parent
    environment = child_environment(PATH=f"{scripts}:/usr/bin:/bin")
    commands = [
        *([sys.executable, "-c", program] for program in programs),
        *(["bash", "-euo", "pipefail", "-c", code] for code in shell),
    ]
    output = ""
    for command in commands:
        command[-1] = command[-1].replace("http://localhost:8000", server.url)
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done
        output += done.stdout
    assert "succeeded ft:tiny:local:first:" in output
    assert re.search(r"^ft:tiny:local:first:\w+ says ", output, re.MULTILINE)
    assert '"object":"chat.completion"' in output
    assert '"object":"upload"' in output
    assert '"status":"completed"' in output
    assert '"status":"ok"' in output
    assert re.search(r"pml-[\w-]{43}\n", output)
    for folder in ("results", "weights"):
        assert (tmp_path / folder / "adapter/adapter_model.safetensors").stat().st_size > 0
    assert (tmp_path / "adapter.tar").stat().st_size > 0
    assert (tmp_path / "step_metrics.csv").read_text().startswith("step,train_loss")


def test_webhooks(own_server: Callable[..., Server]) -> None:
    (block,) = (each for each in blocks("python") if "webhooks" in each)
    asking, receiving = block.split("\n\n")
    names: dict[str, Any] = {"client": own_server("--allow-private-webhooks").client()}
    with contextlib.closing(Receiver()) as receiver:
        exec(asking.replace("https://example.com/hook", receiver.url), names)
        names["client"].webhooks.test(names["endpoint"].id, event_type="fine_tuning.job.succeeded")
    ((names["headers"], names["body"]),) = receiver.messages
    exec(receiving, names)
    assert (names["event"].type, names["event"].data.id) == ("fine_tuning.job.succeeded", "ftjob-test")


def test_the_page_lists_our_fields() -> None:
    table = PAGE.split('extra_body={"pantheraml"')[1].split("\n\n")[1]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(OwnSettings.model_fields)
