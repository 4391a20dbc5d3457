"""Chat templates: what transformers makes of them, and an end to those that do not come to one."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from backend import chat_template, limited_process
from backend.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from backend.config import BUNDLED_MODEL
from backend.errors import CapacityError, LengthError, ModelError, RequestError
from backend.text import Tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind' é 🙂."},
    {"role": "user", "content": "Why?", "extra": {"b": [1, 2.5, None, True], "a": "</script>"}},
    {"role": "assistant", "content": "Because.", "reasoning": "hm"},
]

TEMPLATES = {
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "generation with dashes": "{% for m in messages %}\n {%- generation -%}\n {{ m.role }} {{ loop.index }}\n {%- endgeneration -%}\n{% endfor %}",
    "generation keeps what it sets": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation and a namespace": "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}",
    "tojson": "{{ messages | tojson }}",
    "tojson with options": "{{ messages[1] | tojson(indent=2) }}{{ messages[1].extra | tojson(sort_keys=true, separators=(',', ':')) }}",
    "tojson in ASCII": "{{ messages | tojson(ensure_ascii=true) }}",
    "strftime_now": "{{ strftime_now('%Y-%m') }}",
    "what is not given": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ nothing is defined }}[{{ nothing }}]",
    "dict": "{{ dict(a=1, b='x') | tojson }}{{ dict.fromkeys is defined }}",
    "reasoning": "{{ messages[2].thinking }}{{ messages[2].reasoning_content }}{{ messages[1].thinking is defined }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "blocks alone": "{% for m in messages %}\n  {% if true %}\n{{ m.role }}:\n  {% endif %}\n{% endfor %}\nend\n",
    "add_generation_prompt": "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "a macro": "{% macro show(m) %}[{{ m.role | upper }}: {{ m['content'] | trim }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "texts": "{{ messages[0].content.split(' ')[0] }}{{ messages[1].content.strip('?') }}{{ messages[0]['content'][:2] }}{{ messages | length }}",
}


def render(source: str, messages: list[dict[str, Any]] = MESSAGES, limit: int = 1_000_000) -> str:
    return ChatTemplate(source, "model").render(messages, {"tools": None, "documents": None, "add_generation_prompt": True}, limit)


def with_template(folder: Path, template: object, **settings: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_bytes((BUNDLED_MODEL / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **settings}))
    return Tokenizer(folder)


# -- as transformers has it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_give_what_transformers_gives(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template([MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True)
    assert render(TEMPLATES[name]) == theirs[0]


def test_special_tokens_are_those_that_the_tokenizer_has(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ mask_token }}|{{ unk_token is defined }}|{{ add_bos_token is defined }}"
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>", "mask_token": "<mask>", "unk_token": None}
    tokenizer = with_template(tmp_path, source, add_bos_token=True, **tokens)
    given = {k: v["content"] if isinstance(v, dict) else v for k, v in tokens.items()}
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(BUNDLED_MODEL / "tokenizer.json"), chat_template=source, **given)
    assert tokenizer.render_chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False) == "<s>|</s>|<pad>|<mask>|False|False"


def test_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "x", "reasoning": "y"}]
    render("{{ messages[0].thinking }}", messages)
    assert messages == [{"role": "user", "content": "x", "reasoning": "y"}]


# -- templates that do not load -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["{% for %}", "{% generation %}", "{{ 'x", "{% endgeneration %}", "(" * 5 + "{{ " + "(" * 100_000])
def test_what_is_no_template(source: str) -> None:
    with pytest.raises(ModelError, match="model: the chat template is not valid"):
        ChatTemplate(source, "model")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}{% if enable_thinking is defined %}x{% endif %}",
         ("messages", "enable_thinking")),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", ("thinking",)),
        ("{% set tone = tone | default('mild') %}{{ tone }}{{ namespace(a=tone).a }}{{ raise_exception('no') if x.y is none }}", ("tone", "x")),
        ("{% macro say(it) %}{{ it }}{{ varargs }}{% endmacro %}{{ say(date) }}{% set n = 1 %}{{ n }}{{ 'x' * 10 ** 12 }}", ("date",)),
    ],
)  # fmt: skip
def test_what_a_template_reads(source: str, expected: tuple[str, ...]) -> None:
    assert ChatTemplate(source, "here").variables == expected


def test_a_template_of_megabytes() -> None:
    with pytest.raises(ModelError, match=f"has {MAX_TEMPLATE_CHARACTERS + 1} characters; the limit is {MAX_TEMPLATE_CHARACTERS}"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARACTERS + 1), "model")


@pytest.mark.parametrize("template", [5, {"default": "x"}, True])
def test_a_template_that_is_no_text(tmp_path: Path, template: object) -> None:
    with pytest.raises(ModelError, match="the chat template must be text"):
        with_template(tmp_path, template)


def test_a_template_of_models_that_read_images(tmp_path: Path) -> None:
    """It may be in the settings of what prepares images alone."""
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert with_template(tmp_path, None).chat_template == "of the processor"
    assert with_template(tmp_path, "its own").chat_template == "its own"


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_parts_that_are_no_text(tmp_path: Path, kind: str) -> None:
    """Templates of models that read images leave them out, or write a token that nothing stands behind."""
    tokenizer = with_template(tmp_path, "{% for part in messages[0].content %}{{ part.text or part.type }}{% endfor %}")
    content = [{"type": "text", "text": "a word, "}, {"type": "thinking", "text": "a thought"}]
    assert tokenizer.render_chat([{"role": "user", "content": content}]) == "a word, a thought"
    with pytest.raises(RequestError, match=rf"messages\[0\]\.content: a part of type '{kind}': models of text alone are served"):
        tokenizer.render_chat([{"role": "user", "content": [*content, {"type": kind}]}])


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        with_template(tmp_path, None)


@pytest.mark.parametrize("source", ["{{ x | nothing }}", "{{ x is nothing }}", "{% break %}", "{{ 'x' * 10**10 }}"])
def test_what_fails_when_it_is_compiled_is_an_error_of_requests(source: str) -> None:
    """Compiling computes what is constant: it is left to the process that has limits."""
    template = ChatTemplate(source, "model")
    for _ in range(2):
        with pytest.raises(RequestError, match="the chat template refused the messages"):
            template.render(MESSAGES, {}, 1000)


# -- templates without end ------------------------------------------------------------------------------------------------------

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LOOP, "it ran for more than 0.2 s, the limit"),
        ("{% set x = 7 ** (messages[0].n ** 9) %}", "it ran for more than 0.2 s, the limit"),
        ("{{ 10 ** (10 ** 9) }}", "it ran for more than 0.2 s, the limit"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}", "has more than 1000 characters, the limit"),
        ("{{ 'x' * messages[0].n ** 10 }}", "more than 1024 MiB of memory"),
        ("{{ 'x' | center(messages[0].n ** 10) }}", "more than 1024 MiB of memory"),
        ("{{ ([0] * messages[0].n ** 9) | length }}", "more than 1024 MiB of memory"),
        ("{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}", ", the limit"),
        ("{{ 'x' * 1001 }}", "has more than 1000 characters, the limit"),
    ],
)
def test_no_template_goes_on_for_ever(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that loop, those that grow, and single operations which nothing inside the interpreter can end."""
    shorten(monkeypatch)
    messages = [{"role": "user", "content": "x", "n": 10}]
    template = ChatTemplate(source, "model")
    for _ in range(2):  # the process that ended was another one's
        with pytest.raises(RequestError, match="the chat template refused the messages: ") as caught:
            template.render(messages, {}, 1000)
        assert message in str(caught.value)


def test_what_shorter_messages_mend_is_told_apart() -> None:
    template = ChatTemplate("{{ messages[0].content * 2 }}", "model")
    for content in ("x" * 1001, "x" * 501):
        with pytest.raises(LengthError, match="characters"):
            template.render([{"role": "user", "content": content}], {}, 1000)
    assert len(template.render([{"role": "user", "content": "x" * 500}], {}, 1000)) == 1000


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a rendering, in the process that renders too."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    start = limited_process.subprocess.Popen

    def start_shortened(command: list[str], **options: Any) -> Any:
        code = command[-1].replace("; main()", "; import backend.chat_template as t; t.RENDER_SECONDS = 0.2; main()")
        return start([*command[:-1], code], **options)

    monkeypatch.setattr(limited_process.subprocess, "Popen", start_shortened)


def test_modules_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's stub has the folder that it is in on its path: a checkout that is not installed works by that alone."""
    monkeypatch.chdir(root := Path(__file__).parent.parent)
    monkeypatch.setattr(sys, "path", ["", *(place for place in sys.path if Path(place).resolve() != root and "__editable__" not in place)])
    start = limited_process.subprocess.Popen
    without_hooks = "sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')]; "

    def start_uninstalled(command: list[str], **options: Any) -> Any:
        return start([*command[:-1], command[-1].replace("; sys.path", f"; {without_hooks}sys.path", 1)], **options)

    monkeypatch.setattr(limited_process.subprocess, "Popen", start_uninstalled)
    assert ChatTemplate("{{ messages[1].content }}", "model").render(MESSAGES, {}, 1000) == "Why?"


def test_others_go_on_after_one_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    template = ChatTemplate("{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}{{ messages[0].content }}", "model")
    contents = ["a", "loop", "b", "c", "loop", "d"] * 2

    def ask(content: str) -> str:
        try:
            return template.render([{"role": "user", "content": content}], {}, 1000)
        except RequestError:
            return "refused"

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, contents)) == ["refused" if c == "loop" else c for c in contents]


def test_a_request_does_not_wait_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "QUEUE_SECONDS", 0.1)
    template = ChatTemplate("x", "model")
    with template._process._lock, pytest.raises(CapacityError, match=r"busy with other requests for 0\.1 s: retry later"):
        template.render(MESSAGES, {}, 1000)


def test_a_process_that_died_is_replaced() -> None:
    template = ChatTemplate("{{ messages | length }}", "model")
    assert template.render(MESSAGES, {}, 1000) == "3"
    assert template._process._child is not None
    process = template._process._child._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(RequestError, match="its process ended with status -9"):
        template.render(MESSAGES, {}, 1000)
    assert template.render(MESSAGES, {}, 1000) == "3"


@pytest.mark.parametrize("length", [1, 1_000_000], ids=["short", "more than a pipe holds"])
def test_a_process_that_is_held_is_replaced(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages | length }}", "model")
    assert template.render(MESSAGES, {}, 1000) == "3"
    assert template._process._child is not None
    process = template._process._child._process
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(chat_template, "ANSWER_SECONDS", 0.3)
    with pytest.raises(RequestError, match=r"it gave no answer for 0\.3 s"):
        template.render([{"role": "user", "content": "x" * length}], {}, 2_000_000)
    assert process.poll() is not None, "it is not left behind"


def test_the_process_ends_with_its_template() -> None:
    template = ChatTemplate("x", "model")
    template.render(MESSAGES, {}, 1000)
    assert template._process._child is not None
    process = template._process._child._process
    del template
    assert process.poll() is not None


# -- limits ---------------------------------------------------------------------------------------------------------------------


def test_messages_are_counted_before_they_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes for a context of a few thousand tokens cost no rendering and no tokenizing."""
    template = ChatTemplate("x", "model")
    monkeypatch.setattr(template._process, "ask", lambda *asked: pytest.fail("it was rendered"))
    for message in (
        {"role": "user", "content": "é" * 998},
        {"role": "", "content": [{"text": "x" * 980}] * 2},
        {"role": "", "content": "", "k" * 999: 1},
    ):
        with pytest.raises(RequestError, match=r"messages has \d+ characters or more; the limit is 1000"):
            template.render([message], {}, 1000)


def test_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{% for m in messages %}{{ m.content * 10 }}{% endfor %}")
    assert len(tokenizer.render_chat([{"role": "user", "content": "x" * 100}], 1000)) == 1000
    with pytest.raises(RequestError, match="the prompt that it writes has more than 1000 characters, the limit"):
        tokenizer.render_chat([{"role": "user", "content": "x" * 101}], 1000)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x"])
def test_messages_that_are_no_json(value: object) -> None:
    template = ChatTemplate("{{ messages | length }}", "model")
    with pytest.raises(RequestError, match="they cannot be written as JSON"):
        template.render([{"role": "user", "content": "x", "extra": value}], {}, 1000)
    assert template.render(MESSAGES, {}, 1000) == "3"


def test_messages_nested_without_end() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RequestError, match="they cannot be written as JSON"):
        render("x", [{"role": "user", "content": "x", "extra": value}])


def test_any_thread_may_render() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "model")
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = template.render([{"role": "user", "content": f"{number} é " * 1000}], {}, 100_000)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f"{i} é " * 1000 for i in range(16)}
