"""The `datasets` of an Axolotl config."""

from __future__ import annotations

from typing import Any

from pantheraml.specs.import_config.datasets import DatasetSource, looks_local, put_data
from pantheraml.specs.import_config.draft import Draft
from pantheraml.specs.import_config.hf_training import hold_out

_FORMATS = {
    "alpaca": "instruction",
    "alpaca_w_system.load": "instruction",
    "chat_template": "messages",
    "chat_template.default": "messages",
    "completion": "text",
    "pretrain": "text",
}
_LAYOUT = (
    "Axolotl's alpaca prompt opens with a sentence that explains the task; here the prompt begins with `###"
    " Instruction:`. To keep the sentence, put it into a `system` column."
)
_ROLES = {"role": "role", "content": "content"}


def translate_data(draft: Draft) -> None:
    key = draft.first("datasets", "pretraining_dataset")
    sets = _as_list(draft, key)
    if not sets:
        draft.refuse(key, "names no training data", fix="Name the data that the run trains on.")
    if draft.has("pretraining_dataset") and key == "datasets":
        draft.unsupported("pretraining_dataset", "a run here reads `datasets` or pretraining data, not both")
    sources = [_read(draft, entry, f"{key}.{index}", pretraining=key != "datasets") for index, entry in enumerate(sets)]
    format = put_data(draft, key, sources)
    if format is not None:
        kinds = ", ".join(dict.fromkeys(str(entry.get("type", "pretrain")) for entry in sets))
        draft.put("data.format", format, key, comment=f"{key}: type {kinds}")
    if format == "instruction":
        draft.notes.append(_LAYOUT)
    _evaluation_data(draft)
    _chat_template(draft, chat=any(source.format == "messages" for source in sources))
    _inputs(draft, format)


def _as_list(draft: Draft, key: str) -> list[dict[str, Any]]:
    given = draft.get(key)
    if isinstance(given, str) and key == "pretraining_dataset":  # which may be a bare name
        given = [{"path": given}]
    given = [given] if isinstance(given, dict) else given or []
    if not isinstance(given, list) or not all(isinstance(entry, dict) for entry in given):
        draft.refuse(key, "takes a list of data sets, each with `path` and `type`")
    return given


def _read(draft: Draft, entry: dict[str, Any], place: str, *, pretraining: bool) -> DatasetSource:
    rest = {str(name): value for name, value in entry.items() if value is not None}
    path, files = rest.pop("path", None), rest.pop("data_files", None)
    if not isinstance(path, str) or not path:
        draft.refuse(place, "has no `path`")
    names = [str(name) for name in (files if isinstance(files, list) else [files] if files else [])]
    format = _format(draft, rest, place, pretraining=pretraining)
    kind = rest.pop("ds_type", None)
    split, subset = str(rest.pop("split", "train")), rest.pop("name", None)
    is_local = looks_local(path)
    if path in ("json", "csv", "parquet", "text", "arrow") and len(names) == 1:  # a loader and its file
        path, is_local, names = names[0], True, []
    elif is_local and names:
        draft.unsupported_part(f"{place}.data_files", f"set data.path to these files, or to a folder of them: {names}")
    if kind is not None:
        draft.unneeded_part(f"{place}.ds_type", "the type of a file is known by its name")
    if is_local and split != "train":
        draft.unsupported_part(f"{place}.split", f"data.path is read as a whole; save {split} as a file of its own")
    if is_local and subset is not None:
        draft.unsupported_part(f"{place}.name", "a local file has no configurations")
    for name in rest:
        draft.unsupported_part(f"{place}.{name}", _why_not(name))
    return DatasetSource(
        path, format, is_local, None if subset is None else str(subset), split, ", ".join(names) or None
    )


def _format(draft: Draft, rest: dict[str, Any], place: str, *, pretraining: bool) -> str | None:
    kind = rest.pop("type", "pretrain" if pretraining else None)
    format = _FORMATS.get(kind) if isinstance(kind, str) else None
    if format is None:
        draft.unsupported_part(
            f"{place}.type",
            "not one of alpaca, chat_template, completion: bring the rows to a format of docs/data.md (text, prompt,"
            " messages, instruction)",
        )
    column = rest.pop("text_column" if pretraining else "field", "text")
    if format == "text" and column != "text":
        draft.unsupported_part(f"{place}.field", f"rename the column `{column}` to `text`")
    if format == "messages":
        _chat_columns(draft, rest, place)
    return format


def _chat_columns(draft: Draft, rest: dict[str, Any], place: str) -> None:
    column = rest.pop("field_messages", "messages")
    if column != "messages":
        draft.unsupported_part(f"{place}.field_messages", f"rename the column `{column}` to `messages`")
    tools = rest.pop("field_tools", "tools")
    if tools != "tools":
        draft.unsupported_part(f"{place}.field_tools", f"rename the column `{tools}` to `tools`")
    mappings = rest.pop("message_property_mappings", {})
    mappings = dict(mappings) if isinstance(mappings, dict) else {}
    for ours in _ROLES:
        theirs = rest.pop(f"message_field_{ours}", None) or mappings.pop(ours, ours)
        if theirs != ours:
            name = f"message_property_mappings.{ours}"
            draft.unsupported_part(f"{place}.{name}", f"rename `{theirs}` in each message to `{ours}`")
    for name in mappings:
        draft.unsupported_part(f"{place}.message_property_mappings.{name}", "messages keep their own names here")
    roles = rest.pop("roles", None)
    if isinstance(roles, dict) and any(names != [role] for role, names in roles.items()):
        draft.unsupported_part(f"{place}.roles", "rename the roles to system, user, assistant and tool")
    elif roles is not None:
        draft.unneeded_part(f"{place}.roles", "the roles are named as here")
    trained = rest.pop("roles_to_train", ["assistant"])
    if trained not in (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
        draft.unsupported_part(f"{place}.roles_to_train", "the loss is on assistant turns")
    for key in ("train_on_eos", "train_on_eot"):
        if rest.pop(key, "turn") != "turn":
            draft.unsupported_part(f"{place}.{key}", "the loss includes the token that ends each assistant turn")
    template = rest.pop("chat_template", "tokenizer_default")
    if template != "tokenizer_default":
        draft.unsupported_part(f"{place}.chat_template", _template_advice(str(template)))


def _why_not(name: str) -> str:
    if name in ("shards", "shards_idx", "preprocess_shards", "skip"):
        return "data.path is read as a whole: save the rows to use as a file of their own"
    if name == "trust_remote_code":
        return "data sets that run code are not loaded: save the data as a file"
    if name == "revision":
        return "add revision= to load_dataset when you save the data"
    return "not known as a key of a data set"


def _evaluation_data(draft: Draft) -> None:
    sets = _as_list(draft, "test_datasets")
    if not sets:
        draft.unneeded("test_datasets", "empty")
        hold_out(draft, "val_set_size")
        return
    sources = [_read(draft, entry, f"test_datasets.{index}", pretraining=False) for index, entry in enumerate(sets)]
    put_data(draft, "test_datasets", sources, target="data.eval_path")
    draft.unsupported_if_on("val_set_size", "test_datasets are given as well; Axolotl takes one of the two")


def _template_advice(name: str) -> str:
    return (
        f"the tokenizer's own chat template is used, not {name}: if they differ, set model.tokenizer to a folder with"
        " that template"
    )


def _chat_template(draft: Draft, *, chat: bool) -> None:
    for key in ("chat_template", "chat_template_jinja"):
        if not chat:
            draft.unneeded(key, "the data is not in a chat format")
        elif draft.get(key) == "tokenizer_default":
            draft.unneeded(key, "the tokenizer's own template is used")
        else:
            draft.unsupported(key, _template_advice(str(draft.get(key)) if key == "chat_template" else "a Jinja file"))
    eot = "the loss includes the token with which the chat template ends each assistant turn"
    draft.unneeded("eot_tokens", eot)


def _inputs(draft: Draft, format: str | None) -> None:
    if not draft.flag("train_on_inputs"):
        draft.unneeded("train_on_inputs", "the loss is on the answers only, as here")
    elif format == "text":
        draft.unneeded("train_on_inputs", "the loss is on the whole text, as here")
    else:
        draft.unsupported("train_on_inputs", "the loss is on the answers only; data.format=text has it on everything")
