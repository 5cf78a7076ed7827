"""Chat templates: the functions of Unsloth's notebooks, with the same names and arguments (docs/chat-templates.md)."""

from pantheraml.data.chat_templates.from_columns import apply_chat_template, to_sharegpt
from pantheraml.data.chat_templates.install import CHAT_TEMPLATES, get_chat_template
from pantheraml.data.chat_templates.standardize import standardize_data_formats, standardize_sharegpt
from pantheraml.data.chat_templates.train_on_responses import train_on_responses_only

__all__ = [
    "CHAT_TEMPLATES",
    "apply_chat_template",
    "get_chat_template",
    "standardize_data_formats",
    "standardize_sharegpt",
    "to_sharegpt",
    "train_on_responses_only",
]
