"""TRL's trainers as cases run them: their data, their arguments, and the tokens of each step.

- `sft`: full sequences, or documents that the trainer packs.
- `dpo`: pairs of a prompt and two completions, half a sequence each. The reference is the model without its adapters.
- `grpo`: the training part alone. Generation takes most of a step of GRPO, by engines that are not compared here. So
  every system trains on given completions, one group per step: `_generate_and_score_completions` returns them with
  given advantages. Loss, backward and optimizer step are the system's own.

A row of the data file is a sequence of random words, whose first half serves as the prompt, and the rest, with an end
token, as the completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = {"sft": "trl.trainer.sft_trainer", "dpo": "trl.trainer.dpo_trainer", "grpo": "trl.trainer.grpo_trainer"}
SEQUENCES = {"sft": 1, "dpo": 2, "grpo": 1}
"""Sequences that the model reads per row of a batch."""


def dataset(case: dict[str, Any], path: str) -> Any:
    texts = [json.loads(line)["text"] for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return _DATA[case["trainer"]](case, texts)


def _sequences(case: dict[str, Any], texts: list[str]) -> Any:
    """Full sequences as tokens, which no trainer needs to prepare; uneven documents as text, which it packs."""
    from datasets import Dataset

    if case["data"] == "uneven":
        return Dataset.from_dict({"text": texts})
    ids = [[*_tokens(text.split()), 0] for text in texts]  # t0 instead of an end token
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * len(row) for row in ids]})


def _pairs(case: dict[str, Any], texts: list[str]) -> Any:
    from datasets import Dataset

    halves = [_halves(case, text) for text in texts]
    return Dataset.from_list(
        [
            {"prompt": " ".join(prompt), "chosen": " " + " ".join(chosen), "rejected": " " + " ".join(rejected)}
            for (prompt, chosen), (_, rejected) in zip(halves, halves[1:] + halves[:1], strict=True)
        ]
    )


def _groups(case: dict[str, Any], texts: list[str]) -> Any:
    from datasets import Dataset

    halves, size = [_halves(case, text) for text in texts], case["batch"]
    return Dataset.from_list(
        [
            {
                "prompt": " ".join(halves[start][0]),
                "prompt_tokens": _tokens(halves[start][0]),
                "completions": [[*_tokens(words), 0] for _, words in halves[start : start + size]],
            }
            for start in range(0, len(halves), size)
        ]
    )


def _halves(case: dict[str, Any], text: str) -> tuple[list[str], list[str]]:
    words = text.split()
    return words[: case["seq"] // 2], words[case["seq"] // 2 :]


def _tokens(words: list[str]) -> list[int]:
    return [int(word[1:]) for word in words]


_DATA: dict[str, Callable[[dict[str, Any], list[str]], Any]] = {"sft": _sequences, "dpo": _pairs, "grpo": _groups}


def make_trainer(case: dict[str, Any], parts: dict[str, Any], common: dict[str, Any], tokens: list[int]) -> Any:
    """Return the trainer. `tokens` will get the number of tokens of each batch, without padding.

    `parts`: model, tokenizer, data and callbacks. `common`: arguments of all trainers' configs.
    """
    return _MAKE[case["trainer"]](case, parts, common, tokens)


def _sft(case: dict[str, Any], parts: dict[str, Any], common: dict[str, Any], tokens: list[int]) -> Any:
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    packed = case["data"] == "uneven"
    arguments = SFTConfig(
        **common,
        max_length=case["seq"],
        packing=packed,
        dataset_kwargs=None if packed else {"skip_prepare_dataset": True},
        remove_unused_columns=False,
        use_liger_kernel=case["system"] == "liger",
    )
    run = SFTTrainer(args=arguments, **parts)
    _count(run, tokens, lambda example: len(example["input_ids"]))
    return run


def _dpo(case: dict[str, Any], parts: dict[str, Any], common: dict[str, Any], tokens: list[int]) -> Any:
    from trl import DPOConfig, DPOTrainer  # type: ignore[attr-defined]

    run = DPOTrainer(args=DPOConfig(**common, max_length=case["seq"]), **parts)
    completions = ("chosen_ids", "rejected_ids")
    _count(run, tokens, lambda pair: sum(len(pair["prompt_ids"]) + len(pair[name]) for name in completions))
    return run


def _count(run: Any, tokens: list[int], length: Callable[[dict[str, Any]], int]) -> None:
    """Record the tokens of each batch. Patched on the instance: a collator of another class would change a trainer."""
    collate = run.data_collator.torch_call

    def counted(examples: Any, *rest: Any, **named: Any) -> Any:
        tokens.append(sum(map(length, examples)))
        return collate(examples, *rest, **named)

    run.data_collator.torch_call = counted


def _grpo(case: dict[str, Any], parts: dict[str, Any], common: dict[str, Any], tokens: list[int]) -> Any:
    import torch
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    def no_reward(completions: list[str], **_: Any) -> list[float]:
        raise AssertionError("advantages are given")

    arguments = GRPOConfig(
        **common,
        num_generations=case["batch"],
        max_completion_length=case["seq"] // 2,
        beta=0.0,
        remove_unused_columns=False,
    )
    run = GRPOTrainer(args=arguments, reward_funcs=no_reward, **parts)
    # equal in every step: half of the completions are better than the others
    advantages = torch.ones(case["batch"], device=run.accelerator.device)
    advantages[::2] = -1.0

    def given(rows: list[dict[str, Any]]) -> dict[str, Any]:
        prompts = torch.tensor([row["prompt_tokens"] for row in rows], device=advantages.device)
        completions = torch.tensor(rows[0]["completions"], device=advantages.device)
        tokens.append(prompts.numel() + completions.numel())
        return {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": completions,
            "completion_mask": torch.ones_like(completions),
            "advantages": advantages,
            "num_items_in_batch": torch.tensor(completions.numel(), device=advantages.device),
        }

    run._generate_and_score_completions = given
    return run


_MAKE: dict[str, Callable[..., Any]] = {"sft": _sft, "dpo": _dpo, "grpo": _grpo}
