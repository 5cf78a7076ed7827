"""Chat formats with tools, reasoning or channels: templates of their own.

Like those of turn_format.py they use `end_of_turn`, and `text(content)` for the text of a message.
"""

from __future__ import annotations

from pantheraml.data.chat_templates.turn_format import fail_if, literal, text_macro

_QWEN_SYSTEM = r"""
{%- set ns = namespace(system=default_system, last_query=-1) -%}
{%- if messages and messages[0].role == 'system' -%}
  {%- set ns.system = text(messages[0].content) -%}
  {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools or ns.system is not none -%}
  {{- '<|im_start|>system\n' ~ (ns.system if ns.system is not none else '') -}}
  {%- if tools -%}
    {{- ('\n\n' if ns.system is not none else '') ~ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' ~ (tool | tojson) -}}{%- endfor -%}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' -}}
  {%- endif -%}
  {{- end_of_turn ~ '\n' -}}
{%- endif -%}
"""  # noqa: E501 - the wording that the models were trained with

# Reasoning stays in the turns after the last question of the user (tool results also come as user turns), and is left
# out of earlier ones; with `thinks`, the last turn has a block for it even if it is empty.
_QWEN_TURNS = r"""
{%- for message in messages -%}
  {%- set content = text(message.content) -%}
  {%- set is_result = content.startswith('<tool_response>') and content.endswith('</tool_response>') -%}
  {%- if message.role == 'user' and not is_result -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set content = text(message.content) -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if thinks -%}
      {%- set thought = '' -%}
      {%- if message.reasoning_content is string -%}
        {%- set thought = message.reasoning_content -%}
      {%- elif '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
        {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
      {%- endif -%}
      {%- if loop.index0 > ns.last_query and (loop.last or thought) -%}
        {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' -}}
        {%- set content = content.lstrip('\n') -%}
      {%- endif -%}
    {%- endif -%}
    {{- content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
      {{- '\n' if content or not loop.first else '' -}}
      {{- '<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": ' ~ arguments ~ '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- end_of_turn ~ '\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' -}}
    {{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' -}}
    {{- end_of_turn ~ '\n' if loop.last or loop.nextitem.role != 'tool' else '' -}}
  {%- elif message.role in ['user', 'system'] -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ end_of_turn ~ '\n' -}}
  {%- else -%}
    {{- raise_exception('this chat template has no role ' + message.role | string) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' ~ reply_start -}}{%- endif -%}
"""
_EMPTY_THOUGHT = r"'<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else ''"


def _qwen(*, thinks: bool, default_system: str | None = None, reply_start: str = "''") -> str:
    """`reply_start`: a Jinja expression for what follows the generation prompt."""
    default = "none" if default_system is None else literal(default_system)
    settings = (
        f"{{%- set thinks = {str(thinks).lower()} -%}}"
        f"{{%- set default_system = {default} -%}}"
        f"{{%- set reply_start = {reply_start} -%}}"
    )
    return settings + text_macro() + _QWEN_SYSTEM.strip() + _QWEN_TURNS.strip()


QWEN_2_5 = _qwen(thinks=False, default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
QWEN_3 = _qwen(thinks=True, reply_start=_EMPTY_THOUGHT)
QWEN_3_INSTRUCT = _qwen(thinks=False)
QWEN_3_THINKING = _qwen(thinks=True, reply_start=r"'<think>\n'")

# A thought in the text of an earlier reply is left out, like reasoning_content before the last question.
_GEMMA_4 = r"""
{%- macro without_thoughts(content) -%}
  {%- for part in content.split('<channel|>') -%}{{- part.split('<|channel>')[0] -}}{%- endfor -%}
{%- endmacro -%}
{%- set thinking = enable_thinking is defined and enable_thinking -%}
{%- set ns = namespace(system='', has_system=thinking, last_query=-1) -%}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
  {%- set ns.system = text(messages[0].content) -%}
  {%- set ns.has_system = true -%}
  {%- set messages = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- if ns.has_system -%}
  {{- '<|turn>system\n' ~ ('<|think|>\n' if thinking else '') ~ ns.system ~ end_of_turn ~ '\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set content = text(message.content) -%}
  {%- if message.role == 'user' -%}
    {{- '<|turn>user\n' ~ content ~ end_of_turn ~ '\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|turn>model\n' -}}
    {%- if message.reasoning_content and loop.index0 > ns.last_query -%}
      {{- '<|channel>thought\n' ~ message.reasoning_content ~ '\n<channel|>' -}}
    {%- endif -%}
    {{- without_thoughts(content) | trim ~ end_of_turn ~ '\n' -}}
  {%- else -%}
    {{- raise_exception('this chat template has no role ' + message.role | string) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\n' ~ reply_start -}}{%- endif -%}
"""
_NO_TOOLS = fail_if("tools", "this chat template has no tools: keep the tokenizer's own")
_NO_CALLS = (
    "{%- for message in messages -%}"
    + fail_if("message.tool_calls", "this chat template has no tool calls: keep the tokenizer's own")
    + "{%- endfor -%}"
)


def _gemma_4(reply_start: str) -> str:
    media = {"image": "<|image|>", "audio": "<|audio|>", "video": "<|video|>"}
    start = f"{{%- set reply_start = {reply_start} -%}}"
    return _NO_TOOLS + _NO_CALLS + start + text_macro(trim=True, media=media) + _GEMMA_4.strip()


GEMMA_4 = _gemma_4("''")
# the larger models answer without thinking only after an empty thought
GEMMA_4_THINKING = _gemma_4(
    r"'' if enable_thinking is defined and enable_thinking else '<|channel>thought\n<channel|>'"
)

# The harmony format: the last reply ends with `<|return|>`, which is never an input, and only it keeps its thought.
_GPT_OSS = r"""
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n' -}}
{{- 'Current date: ' ~ strftime_now('%Y-%m-%d') ~ '\n\nReasoning: ' ~ (reasoning_effort | default('medium')) -}}
{{- '\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' -}}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
  {{- '<|start|>developer<|message|># Instructions\n\n' ~ text(messages[0].content) ~ '\n\n<|end|>' -}}
  {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = text(message.content) -%}
  {%- if message.role == 'user' -%}
    {{- '<|start|>user<|message|>' ~ content ~ '<|end|>' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set is_target = loop.last and not add_generation_prompt -%}
    {%- if is_target and message.thinking -%}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' -}}
    {%- endif -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' ~ content ~ (end_of_turn if is_target else '<|end|>') -}}
  {%- else -%}
    {{- raise_exception('this chat template has no role ' + message.role | string) -}}
  {%- endif -%}
{%- endfor -%}
{{- '<|start|>assistant' if add_generation_prompt else '' -}}
"""  # noqa: E501 - the wording that the models were trained with
GPT_OSS = _NO_TOOLS + _NO_CALLS + text_macro() + _GPT_OSS.strip()
