"""Replies of the models of vLLM's reasoning and tool parsers: one for each registered parser."""

# ruff: noqa: RUF001 (their markers are their own)

import re

THOUGHT = "step 1: 日本 é\nthen self"
ANSWER = "It is 🙂 done."
ARGUMENTS = '{"a": 12, "b": "x é🙂 self"}'
CALL = f'{{"name": "add", "arguments": {ARGUMENTS}}}'
PARAMETERS = f'{{"name": "add", "parameters": {ARGUMENTS}}}'
QWEN = (
    "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\nx é🙂 self\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>x é🙂 self</arg_value>\n</tool_call>"
)
INVOKE = (
    '<invoke name="add">\n<parameter name="a">12</parameter>\n<parameter name="b">x é🙂 self</parameter>\n</invoke>'
)
CALLS = f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
HERMES = f"I add. {CALLS}"


def dsml(wrapper: str, space: str = "") -> str:
    mark = f"｜DSML｜{space}"
    return (
        f'I add.\n\n<{mark}{wrapper}>\n<{mark}invoke name="add">\n'
        f'<{mark}parameter name="a" string="false">12</{mark}parameter>\n'
        f'<{mark}parameter name="b" string="true">x é🙂 self</{mark}parameter>\n</{mark}invoke>\n</{mark}{wrapper}>'
    )


def think(start: str = "<think>", end: str = "</think>") -> str:
    return f"{start}{THOUGHT}{end}{ANSWER}"


def deepseek(*, json: bool) -> str:
    body = f"function<｜tool▁sep｜>add\n```json\n{ARGUMENTS}\n```" if json else f"add<｜tool▁sep｜>{ARGUMENTS}"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


MUSE = f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=user<|message|>{ANSWER}<|eot|>"
MUSE_CALL = (
    " to=add<|message|><atem:function_calls>\n"
    '<atem:invoke name="add">\n<atem:parameter name="a">12</atem:parameter>\n'
    '<atem:parameter name="b">x é🙂 self</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
    "<|start|>assistant to=user<|message|>I add.<|eot|>"
)

REASONING = {
    "beam": think(),
    "cohere_command3": think("<|START_THINKING|>", "<|END_THINKING|>"),
    "cohere_command4": think("<|START_THINKING|>", "<|END_THINKING|>"),
    "deepseek_r1": think(),
    "deepseek_v3": think(),
    "deepseek_v4": think(),
    "deepseek_v41": think(),
    "ernie45": f"{THOUGHT}</think>\n\n\n<response>\n{ANSWER}\n</response>\n",
    "gemma4": f"<|channel>thought\n{THOUGHT}<channel|>{ANSWER}",
    "glm45": think(),
    "glm47": think(),
    "granite": f"Here is my thought process: {THOUGHT} Here is my response: {ANSWER}",
    "granite_thinking_parser": think("<think>", "\n</think>\n"),
    "hf": think(),
    "holo2": think(),
    "hunyuan_a13b": f"<think>\n{THOUGHT}\n</think>\n<answer>\n{ANSWER}\n</answer>",
    "hy_v3": think(),
    "hy_v4": think(),
    "inkling": (
        f"<|message_model|><|content_thinking|>{THOUGHT}<|end_message|>"
        f"<|message_model|><|content_text|>{ANSWER}<|end_message|>"
    ),
    "k2_horizon": think("<ifm|think>", "</ifm|think>"),
    "kimi_k2": think(),
    "kimi_k3": (
        f"<|open|>think<|sep|>{THOUGHT}<|close|>think<|sep|>"
        f"<|open|>response<|sep|>{ANSWER}<|close|>response<|sep|><|close|>message<|sep|>"
    ),
    "ling3": think(),
    "mimo": think(),
    "minicpmv": think(),
    "minimax_m2": think(""),
    "minimax_m2_append_think": think(""),
    "minimax_m3": think("<mm:think>", "</mm:think>"),
    "mistral": think("[THINK]", "[/THINK]"),
    "muse": MUSE,
    "muse_glimmer": MUSE,
    "musespark1x": MUSE,
    "nemotron_v3": think(),
    "olmo3": think(),
    "openai_gptoss": think(),
    "plamo3": think("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "poolside_v1": think(),
    "qwen3": think(),
    "seed_oss": think("<seed:think>", "</seed:think>"),
    "step3": think(""),
    "step3p5": think(),
    "step5": think(),
}

TOOLS = {
    "apertus": f'I add. <|tools_prefix|>[{{"add": {ARGUMENTS}}}, {{"add": {ARGUMENTS}}}]<|tools_suffix|>',
    "beam": HERMES,
    "cohere_command3": HERMES,
    "cohere_command4": HERMES,
    "deepseek_v3": deepseek(json=True),
    "deepseek_v31": deepseek(json=False),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", " "),
    "dots": f"I add. <dots_function_call>\n{INVOKE}\n</dots_function_call>",
    "ernie45": f"I add.\n<tool_call>\n{CALL}\n</tool_call>\n",
    "functiongemma": (
        "<start_function_call>call:add{a:<escape>12<escape>,b:<escape>x é🙂 self<escape>}<end_function_call>"
    ),
    "gemma4": '<|tool_call>call:add{a:12,b:<|"|>x é🙂 self<|"|>}<tool_call|>',
    "gigachat3": f"I add.<|function_call|>{CALL}",
    "glm45": GLM,
    "glm47": f"I add. {GLM.replace(chr(10), '')}",
    "granite": f"I add. <|tool_call|>[{CALL}, {CALL}]",
    "granite-20b-fc": f"<function_call> {CALL} <function_call> {CALL}",
    "granite4": HERMES,
    "hermes": HERMES,
    "hf": HERMES,
    "hunyuan_a13b": f"<tool_calls>[{CALL}, {CALL}]</tool_calls>",
    "hy_v3": f"I add.<tool_calls>\n{GLM.replace('add', 'add<tool_sep>')}\n</tool_calls>",
    "hy_v4": f"I add.<tool_calls>{GLM.replace(chr(10), '')}</tool_calls>",
    "inkling": f'<|message_model|><|content_invoke_tool_json|>{{"name":"add","args":{ARGUMENTS}}}<|end_message|>',
    "internlm": f"I add. <|action_start|><|plugin|>{PARAMETERS}<|action_end|>",
    "jamba": f"I add. <tool_calls>[\n{CALL},\n{CALL}\n]</tool_calls>",
    "k2_horizon": (
        "I add.<ifm|tool_calls><ifm|tool_call>add<ifm|arg_key>a</ifm|arg_key><ifm|arg_value>12</ifm|arg_value>"
        "<ifm|arg_key>b</ifm|arg_key><ifm|arg_value>x é🙂 self</ifm|arg_value></ifm|tool_call></ifm|tool_calls>"
    ),
    "kimi_k2": (
        "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        "<|open|>response<|sep|>I add.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="add" index="1"<|sep|>'
        '<|open|>argument key="a" type="integer"<|sep|>12<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="string"<|sep|>x é🙂 self<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "lfm2": "<|tool_call_start|>[add(a=12, b='x é🙂 self')]<|tool_call_end|>I add.",
    "ling3": GLM,
    "llama3_json": PARAMETERS,
    "llama4_json": PARAMETERS,
    "llama4_pythonic": "[add(a=12, b='x é🙂 self'), add(a=3, b='z')]",
    "longcat": HERMES.replace("tool_call>", "longcat_tool_call>"),
    "mimo": f"I add. {QWEN}",
    "minicpm5": 'I add. <function name="add"><param name="a">12</param><param name="b">x é🙂 self</param></function>',
    "minimax_m2": f"I add. <minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>",
    "minimax_m3": (
        'I add. ]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">]<]minimax[>[<a>12]<]minimax[>[</a>'
        "]<]minimax[>[<b>x é🙂 self]<]minimax[>[</b>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "mistral": f"I add. [TOOL_CALLS][{CALL}, {CALL}]",
    "muse": MUSE_CALL,
    "muse_glimmer": MUSE_CALL,
    "musespark1x": MUSE_CALL,
    "olmo3": "<function_calls>add(a=12, b='x é🙂 self')\nadd(a=3, b='z')</function_calls>",
    "openai": HERMES,
    "phi4_mini_json": f"functools[{CALL}, {CALL}]",
    "plamo3": (
        "I add.<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>add"
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
        f"{ARGUMENTS}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>"
    ),
    "poolside_v1": f"I add. {GLM}",
    "pythonic": "[add(a=12, b='x é🙂 self'), add(a=3, b='z')]",
    "qwen3_coder": f"I add. {QWEN}\n{QWEN}",
    "qwen3_json": HERMES,
    "qwen3_xml": f"I add. {QWEN}\n{QWEN}",
    "seed_oss": f"I add. {QWEN.replace('tool_call>', 'seed:tool_call>')}",
    "step3": (
        "I add.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="add"><steptml:parameter name="a">12</steptml:parameter>'
        '<steptml:parameter name="b">x é🙂 self</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>"
    ),
    "step3p5": f"I add. {QWEN}",
    "step5": f"I add. {QWEN}",
    "xlam": f"[{CALL}, {CALL}]",
}

MARKERS = [
    *("<think>", "<answer>", "</answer>", "<response>", "</response>", "<|python_tag|>", "[TOOL_CALLS]", "<assistant>"),
    *("[THINK]", "[/THINK]", "]<]minimax[>[", '<|"|>', "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *(tag for text in [*REASONING.values(), *TOOLS.values()] for tag in re.findall(r"</?[^\s<>=\"]+>", text)),
]
"""Tokens of these models' vocabularies."""
