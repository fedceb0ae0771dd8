"""What the scripted server says: raw model text, behind the ``<think>`` that the prompt has opened."""

from __future__ import annotations

from collections.abc import Mapping

GUIDE = """The question is about prefix reuse. I should say what is kept, when it helps, and give a small example.

A table fits for the costs, and the code should be short.
</think>

### What is kept

After each turn the engine keeps the **state** of the conversation: the recurrent matrices and the pages with keys and
values. The next request with the same beginning starts from there.

1. The prompt is compared with the kept states, token by token.
2. The longest match is restored.
3. Only the rest is computed.

| prompt | reused | computed |
|---|---:|---:|
| first turn | 0 | 812 |
| second turn | 1,024 | 37 |
| edited turn | 640 | 421 |

```python
def computed(prompt: list[int], kept: list[int]) -> int:
    # tokens behind the longest common beginning
    same = 0
    while same < min(len(prompt), len(kept)) and prompt[same] == kept[same]:
        same += 1
    return len(prompt) - same
```

> A state can only be reused whole: it says what all tokens before it have said.

See `--snapshots` and [the notes](https://example.org/notes).<|im_end|>"""

CALLS = """Two cities are asked for, so I call the function twice.
</think>

I look up both cities.

<tool_call>
<function=get_weather>
<parameter=city>
Lisbon
</parameter>
<parameter=unit>
celsius
</parameter>
</function>
</tool_call>
<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
<parameter=unit>
celsius
</parameter>
</function>
</tool_call><|im_end|>"""

RESULTS = """Both results are here.
</think>

Lisbon has **21 °C** and sun, Oslo **4 °C** and rain. The difference is 17 degrees.<|im_end|>"""

HOSTILE = """<img src="/stats" onerror="window.broken = 1"><script>window.broken = 2</script>
</think>

<img src="/stats" onerror="window.broken = 3"><script>window.broken = 4</script>

<b>bold</b> is text here, and so is &lt;.

[a link](javascript:window.broken=5) and [another](data:text/html,x), ![a picture](https://example.org/a.png)

```html
<script>window.broken = 6</script>
```<|im_end|>"""

_STORY = """The lighthouse keeper counted the waves and wrote each number down. At noon the fog came in, and \
the counting went on by ear. A gull sat on the railing and listened.

"""
STORY = f"It should be long.\n</think>\n\n{_STORY * 12}<|im_end|>"

SHORT = """A short question.
</think>

Hello. What can I do for you?<|im_end|>"""

ANSWERS: Mapping[str, str] = {
    "<tool_response>": RESULTS,
    "weather": CALLS,
    "markup": HOSTILE,
    "story": STORY,
    "reuse": GUIDE,
    "": SHORT,
}
"""A word of the last user turn → the answer; the first that fits."""


def answer_to(prompt: str) -> str:
    """What follows a rendered prompt. With thinking switched off the prompt has closed it, and the answer has none."""
    turn = prompt.rpartition("<|im_start|>user\n")[2]
    answer = next(text for word, text in ANSWERS.items() if word in turn.lower())
    return answer if prompt.endswith("<think>\n") else answer.partition("</think>\n\n")[2]
