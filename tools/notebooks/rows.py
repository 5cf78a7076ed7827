"""Small synthetic data sets with the columns of the public ones that notebooks load."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

ROWS = 160
_MORE_ROWS = {"ultrafeedback": 4000, "MathVista": 240, "Emilia": 7600}
"""Notebooks train on half a percent of the first, and read rows 165 and 7546 of the others."""
_IMAGE_SIZE = (56, 56)

Row = dict[str, Any]


class UnknownDataError(LookupError):
    """No synthetic rows are known for this data set."""


def load_dataset(
    path: str, name: str | None = None, *_: Any, split: Any = None, streaming: bool = False, **rest: Any
) -> Any:
    """Take the place of `datasets.load_dataset`: the same columns, few rows, nothing downloaded."""
    from datasets import Dataset, DatasetDict

    if path in ("csv", "json", "parquet"):
        rows = _table(rest.get("column_names"), path)
    else:
        maker = next((make for pattern, make in _MAKERS if re.search(pattern, path, re.IGNORECASE)), None)
        if maker is None:
            raise UnknownDataError(f"no synthetic rows for the data set {path}")
        count = next((most for name, most in _MORE_ROWS.items() if name in path), ROWS)
        rows = [maker(number) for number in range(count)]
    data = Dataset.from_list(rows)
    if "Emilia" in path:
        data = data.with_transform(_with_arrays)
    if split is None:
        return DatasetDict({"train": data, "test": data.select(range(16))})
    if isinstance(split, list):
        return [data for _ in split]
    return data.to_iterable_dataset() if streaming else data


def _table(columns: Any, kind: str) -> list[Row]:
    if not columns:
        raise UnknownDataError(f"the columns of a {kind} file are not known")
    return [{column: f"{column} {number}: {sentence(number)}" for column in columns} for number in range(ROWS)]


def sentence(number: int) -> str:
    subject = ("A cat", "The river", "A student", "The train", "My neighbor")[number % 5]
    action = ("crosses the bridge", "reads a letter", "counts the stars", "waits for rain")[number % 4]
    return f"{subject} {action} {number} times."


def _question(number: int) -> str:
    return f"What is {number} + {number % 7}? {sentence(number)}"


def _answer(number: int) -> str:
    return str(number + number % 7)


def _image(number: int) -> Any:
    from PIL import Image

    return Image.new("RGB", _IMAGE_SIZE, ((number * 37) % 256, (number * 91) % 256, (number * 17) % 256))


def _math(number: int) -> Row:
    return {
        "problem": _question(number), "expected_answer": _answer(number), "problem_type": "has_answer_extracted",
        "generated_solution": f"<think>\nAdd the numbers.\n</think>\n\nIt is \\boxed{{{_answer(number)}}}.",
        "generation_model": "m", "pass_rate_72b_tir": "0.5", "inference_mode": "cot", "problem_source": "s",
    }  # fmt: skip


def _sharegpt(number: int) -> Row:
    turns = [
        {"from": "human", "value": _question(number)}, {"from": "gpt", "value": f"It is {_answer(number)}."},
        {"from": "human", "value": "Are you sure?"}, {"from": "gpt", "value": "Yes, I added them twice."},
    ]  # fmt: skip
    return {"conversations": turns, "source": "synthetic", "score": 4.5}


def _alpaca(number: int) -> Row:
    return {
        "instruction": _question(number), "input": sentence(number) if number % 2 else "",
        "output": f"It is {_answer(number)}.",
    }  # fmt: skip


def _dapo(number: int) -> Row:
    return {
        "prompt": _question(number), "solution": _answer(number), "data_source": "math",
        "source_prompt": [{"role": "user", "content": _question(number)}], "ability": "MATH",
        "reward_model": {"ground_truth": _answer(number), "style": "rule"}, "extra_info": {"index": str(number)},
    }  # fmt: skip


def _gsm8k(number: int) -> Row:
    return {"question": _question(number), "answer": f"Add the numbers.\n#### {_answer(number)}"}


def _math_vista(number: int) -> Row:
    return {
        "pid": str(number), "question": _question(number), "image": f"images/{number}.jpg",
        "decoded_image": _image(number), "choices": None, "unit": None, "precision": None,
        "answer": _answer(number) if number % 4 else "none", "question_type": "free_form", "answer_type": "integer",
        "query": _question(number),
    }  # fmt: skip


def _thinking(number: int) -> Row:
    developer, user, analysis, final = "Answer briefly.", _question(number), "Add them.", f"It is {_answer(number)}."
    messages = [
        {"role": "system", "content": f"reasoning language: English\n\n{developer}", "thinking": None},
        {"role": "user", "content": user, "thinking": None},
        {"role": "assistant", "content": final, "thinking": analysis},
    ]
    return {
        "reasoning_language": "English", "developer": developer, "user": user, "analysis": analysis, "final": final,
        "messages": messages,
    }  # fmt: skip


_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def _tool_messages(number: int) -> list[Row]:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": number}}}
    return [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": _question(number)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "tool_call_id": "call_1", "content": _answer(number)},
        {"role": "assistant", "content": f"It is {_answer(number)}."},
    ]


def _agent(number: int) -> Row:
    messages = _tool_messages(number)
    messages[0]["tools"] = [_TOOL]
    for message in messages:
        if message["role"] == "assistant":
            message["think"] = "The tool adds."
    return {"messages": json.dumps(messages)}


def _preference(number: int) -> Row:
    return {
        "instruction": _question(number), "input": "", "accepted": f"It is {_answer(number)}.",
        "rejected": "I do not know.",
    }  # fmt: skip


def _ultrafeedback(number: int) -> Row:
    user = {"role": "user", "content": _question(number)}
    chosen = [user, {"role": "assistant", "content": f"It is {_answer(number)}."}]
    return {
        "prompt": _question(number), "prompt_id": str(number), "chosen": chosen, "messages": chosen,
        "rejected": [user, {"role": "assistant", "content": "I do not know."}],
        "score_chosen": 8.0, "score_rejected": 3.0,
    }  # fmt: skip


def _speech(number: int) -> Row:
    samples = [0.0] * 800
    return {"audio": {"array": samples, "sampling_rate": 16000}, "text": sentence(number)}


def _with_arrays(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return recordings as `datasets` decodes them."""
    import numpy as np

    recordings = [{**each, "array": np.array(each["array"])} for each in batch.get("audio", [])]
    return {**batch, "audio": recordings} if recordings else batch


def _llava(number: int) -> Row:
    return {
        "images": [_image(number)],
        "messages": [
            {"role": "user", "content": [
                {"index": None, "text": "What is this?", "type": "text"}, {"index": 0, "text": None, "type": "image"},
            ]},
            {"role": "assistant", "content": [{"index": None, "text": sentence(number), "type": "text"}]},
        ],
    }  # fmt: skip


_MAKERS: tuple[tuple[str, Callable[[int], Row]], ...] = (
    (r"OpenMathReasoning", _math),
    (r"LaTeX_OCR", lambda n: {"image": _image(n), "text": f"x^{{{n}}} + \\frac{{1}}{{{n + 1}}}"}),
    (r"parsynth-ocr", lambda n: {"image_path": _image(n), "image": _image(n), "text": sentence(n)}),
    (r"FineTome|guanaco-sharegpt", _sharegpt),
    (r"alpaca-gpt4-korean", lambda n: {"id": str(n), **_sharegpt(n)}),
    (r"alpaca", lambda n: {**_alpaca(n), "text": sentence(n)}),
    (r"DAPO-Math", _dapo),
    (r"gsm8k", _gsm8k),
    (r"MathVista", _math_vista),
    (r"wikipedia", lambda n: {"id": str(n), "url": "u", "title": f"Title {n}", "text": sentence(n) * 3}),
    (r"dair-ai/emotion", lambda n: {"text": sentence(n), "label": n % 6}),
    (r"TinyStories", lambda n: {"text": sentence(n) * 3}),
    (r"TxT360", _agent),
    (r"mobile-actions", lambda n: {"messages": _tool_messages(n), "tools": [_TOOL], "metadata": "train"}),
    (r"Multilingual-Thinking", _thinking),
    (r"dolphin-sft", _preference),
    (r"ultrafeedback", _ultrafeedback),
    (r"llava-instruct", _llava),
    (r"Emilia", _speech),
    (r"Radiology", lambda n: {"image": _image(n), "image_id": str(n), "caption": sentence(n), "cui": ["c"]}),
    (r"codeforces-cots", lambda n: {
        "problem": _question(n), "generation": _answer(n), "prompt": _question(n),
        "messages": [{"role": "user", "content": _question(n)}, {"role": "assistant", "content": _answer(n)}],
    }),
    (r"ChessInstruct", lambda n: {
        "task": "Name the winner.", "input": json.dumps({"moves": ["e2e4"], "n": n}), "KIND": "FIND_WINNER",
        "expected_output": json.dumps({"winner": "white"}),
    }),
    (r"DeepScaleR", lambda n: {"problem": _question(n), "answer": _answer(n), "solution": sentence(n)}),
)  # fmt: skip
