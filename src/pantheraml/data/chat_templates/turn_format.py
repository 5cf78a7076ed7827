"""Chat formats that wrap each message in text, and the Jinja template of such a format.

Most formats differ only in the text before and after a message and in what happens to the system message, so they are
data (turn_formats.py). Formats with tools or reasoning have templates of their own (jinja_formats.py).

Every template uses the variable `end_of_turn`, which `with_end_of_turn` defines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_VARIABLES = {
    "{content}": "content",
    "{role}": "message.role",
    "{end}": "end_of_turn",
    "{bos}": "bos_token",
    "{date}": "(date_string | default('26 Jul 2024'))",  # the date and the variable of Llama 3.1's own template
}
_PLACEHOLDER = re.compile("(" + "|".join(map(re.escape, _VARIABLES)) + ")")


@dataclass(frozen=True, kw_only=True)
class TurnFormat:
    """A format in which every message is wrapped in text.

    Turns are strings with {content}, {role}, {bos}, {date} and {end}, the end-of-turn token.
    """

    user: str
    assistant: str
    generation: str
    """What follows the conversation if a reply is to be generated."""
    end_of_turn: str | None = None
    """The token that ends an assistant turn; None: the tokenizer's eos token."""
    system: str | None = None
    """The system turn; None: the format has none, and the system message precedes the first user message."""
    system_in_user: tuple[str, str] = ("", "\n\n")
    """Text around the system message within the first user message, if `system` is None."""
    default_system: str | None = None
    """The system message of a conversation without one."""
    others: str | None = None
    """Turns of other roles; None: an error."""
    bos: bool = True
    """Whether the conversation starts with the bos token."""
    trim: bool = False
    """Whether white space around a message is removed."""
    alternate: bool = False
    """Whether user and assistant must alternate, as the format's own template demands."""
    media: Mapping[str, str] = field(default_factory=dict)
    """Placeholder token of each kind of content that is not text."""

    def to_jinja(self) -> str:
        return "".join(
            [
                text_macro(trim=self.trim, media=self.media),
                fail_if("tools", "this chat template has no tools: keep the tokenizer's own"),
                self._system_message(),
                "{{- bos_token -}}" if self.bos else "",
                self._system_turn(),
                "{%- for message in messages -%}",
                "{%- set content = text(message.content) -%}",
                self._check_message(),
                self._turns(),
                "{%- endfor -%}",
                "{%- if add_generation_prompt -%}",
                _output(self.generation),
                "{%- endif -%}",
            ]
        )

    def _system_message(self) -> str:
        """Take the first message off `messages` if it is the system message."""
        default = "none" if self.default_system is None else literal(self.default_system)
        whole = ", strip=false" if self.system is None else ""  # as in Gemma's own template
        return (
            f"{{%- set system = {default} -%}}"
            "{%- if messages and messages[0].role == 'system' -%}"
            f"{{%- set system = text(messages[0].content{whole}) -%}}{{%- set messages = messages[1:] -%}}"
            "{%- endif -%}"
        )

    def _system_turn(self) -> str:
        if self.system is None:
            problem = "the system message must precede a user message"
            return fail_if("system is not none and (not messages or messages[0].role != 'user')", problem)
        return "{%- if system is not none -%}{%- set content = system -%}" + _output(self.system) + "{%- endif -%}"

    def _check_message(self) -> str:
        calls = fail_if("message.tool_calls", "this chat template has no tool calls: keep the tokenizer's own")
        if not self.alternate:
            return calls
        return calls + fail_if(
            "(message.role == 'user') != (loop.index0 % 2 == 0)", "roles must alternate: user, assistant, user, ..."
        )

    def _turns(self) -> str:
        user = _output(self.user)
        if self.system is None:
            before, after = map(literal, self.system_in_user)
            prefixed = f"{{%- set content = {before} + system + {after} + content -%}}"
            user = f"{{%- if loop.first and system is not none -%}}{prefixed}{{%- endif -%}}" + user
        parts = [f"{{%- if message.role == 'user' -%}}{user}"]
        parts.append(f"{{%- elif message.role == 'assistant' -%}}{_output(self.assistant)}")
        if self.system is not None:
            parts.append(f"{{%- elif message.role == 'system' -%}}{_output(self.system)}")
        unknown = "{{- raise_exception('this chat template has no role ' + message.role | string) -}}"
        parts.append(f"{{%- else -%}}{unknown if self.others is None else _output(self.others)}{{%- endif -%}}")
        return "".join(parts)


def with_end_of_turn(template: str, token: str | None) -> str:
    """Define `end_of_turn` for a template; None: the eos token."""
    return f"{{%- set end_of_turn = {'eos_token' if token is None else literal(token)} -%}}{template}"


def literal(text: str) -> str:
    """Return a Jinja string literal."""
    return json.dumps(text, ensure_ascii=False)


def fail_if(condition: str, problem: str) -> str:
    return f"{{%- if {condition} -%}}{{{{- raise_exception({literal(problem)}) -}}}}{{%- endif -%}}"


def text_macro(*, trim: bool = False, media: Mapping[str, str] | None = None) -> str:
    """Define `text(content)`: the text of a string, or of a list of parts; anything unknown is an error."""
    strip = " | trim if strip else " if trim else ""
    kinds = "".join(
        f"{{%- elif part.type == {literal(kind)} -%}}{{{{- {literal(token)} -}}}}"
        for kind, token in (media or {}).items()
    )
    return (
        "{%- macro text(content, strip=true) -%}"
        f"{{%- if content is string -%}}{{{{- content{strip and strip + 'content'} -}}}}"
        "{%- elif content is not none -%}{%- for part in content -%}"
        f"{{%- if part.type == 'text' -%}}{{{{- part.text{strip and strip + 'part.text'} -}}}}{kinds}"
        "{%- else -%}{{- raise_exception('this chat template has no content of type ' + part.type | string) -}}"
        "{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{%- endmacro -%}"
    )


def _output(turn: str) -> str:
    parts = [_VARIABLES.get(part, literal(part)) for part in _PLACEHOLDER.split(turn) if part]
    return f"{{{{- {' ~ '.join(parts)} -}}}}" if parts else ""
