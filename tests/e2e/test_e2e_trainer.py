"""A script with PantheraMLDistributedTrainer: started in every way, and killed and resumed, with the same numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import toy
from tests.e2e.conftest import COMMAND_SECONDS, Ended, Playground, result_of
from tests.event_log import raw_events

pytestmark = pytest.mark.extended

PAGE = Path(__file__).parents[2] / "docs/trainers.md"
SCRIPT = """
import os, signal, sys
from datasets import load_dataset
from transformers import TrainerCallback
from trl import SFTConfig
from pantheraml import FastLanguageModel, PantheraMLDistributedTrainer

MODEL, DATA, OUTPUT, ARGUMENT = sys.argv[1:]

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if ARGUMENT == "kill" and state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

model, tokenizer = FastLanguageModel.from_pretrained(MODEL, max_seq_length=64, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=4, random_state=1)
trainer = PantheraMLDistributedTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=load_dataset("json", data_files=DATA, split="train"),
    args=SFTConfig(
        output_dir=OUTPUT, max_steps=4, per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", 1)),
        logging_steps=1, save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
    ),
    callbacks=[Kill()],
)
trainer.train(resume_from_checkpoint=ARGUMENT == "resume")
trainer.save_model(OUTPUT + "/adapter")
"""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip


def run(playground: Playground, launcher: list[str], output: str, argument: str = "", **environment: str) -> Ended:
    script = playground.root / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, *launcher, str(script), str(playground.model), str(playground.data), output, argument],
        cwd=playground.root,
        env={**playground.environment, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    playground.started.append(process)
    return result_of(process)


def losses(playground: Playground, output: str) -> list[float]:
    return [event["loss"] for event in raw_events(playground.root / output) if event["kind"] == "train.step"]


def adapter(playground: Playground, output: str) -> bytes:
    return Path(playground.root, output, "adapter/adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def single(playground: Playground) -> list[float]:
    ended = run(playground, [], "single")
    assert ended.code == 0, ended
    return losses(playground, "single")


@pytest.mark.seed(
    *("S0-028", "S0-092", "S2-055", "S0:146", "S2:93", "S0-044", "S0-075", "S0-076", "S0-077", "S2-022", "S2-023"),
    *("S2-053",),
)
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "relaunched"])
def test_every_launcher_gives_the_losses_of_one_process(
    playground: Playground, single: list[float], launcher: str, port: str
) -> None:
    command, environment = {
        "torchrun": (TORCHRUN, {}),
        "accelerate": ([*ACCELERATE, "--main_process_port", port], {}),
        "relaunched": ([], {"PANTHERAML_NPROC": "2"}),
    }[launcher]
    ended = run(playground, command, launcher, **environment)
    assert ended.code == 0, ended
    (started,) = [event for event in raw_events(playground.root / launcher) if event["kind"] == "train.started"]
    assert started["world_size"] == 2
    assert losses(playground, launcher) == pytest.approx(single, rel=1e-5)
    assert "Multi-GPU training enabled: 2 processes over gloo" in ended.err
    assert ("relaunching as 2 processes" in ended.err) == (launcher == "relaunched")


def test_the_page_runs(playground: Playground, tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "my-model", max_position_embeddings=2048)
    toy.write_jsonl(tmp_path / "my-data.jsonl", toy.arithmetic(32))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = code.replace("save_steps=10", "save_steps=10, max_steps=10, use_cpu=True, bf16=False, report_to=[]")
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=playground.environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "my-run/checkpoint-10/manifest.json").is_file()


def test_killed_script_resumes_bit_for_bit(playground: Playground, single: list[float]) -> None:
    killed = run(playground, [], "killed", "kill")
    assert killed.code in (-9, 137), killed
    resumed = run(playground, [], "killed", "resume")
    assert resumed.code == 0, resumed
    assert re.search(r"resuming from killed/checkpoint-2", resumed.err), resumed
    assert losses(playground, "killed")[-2:] == single[-2:]
    assert adapter(playground, "killed") == adapter(playground, "single")
