"""Compare the texts that chat templates produce with the texts that transformers produces. Invalid and malicious
templates are also tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.data import TokenizerConfig
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.extensions.use.inference import template_worker
from megatron.extensions.use.inference.chat_template import ChatTemplate, chat_tokens, find_chat_template
from megatron.extensions.use.inference.kept_files import keep_tokenizer
from tests.corpus import byte_level

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}
{% if loop.last %}{% continue %}{% endif %}
{{- '' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant {{ {'é': [1]} | tojson }}
{% endif %}"""

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " be short "},
    {"role": "user", "content": "née <|im_end|>"},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": "why?"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a tokenizer that prepends <s> to each text, and return its folder."""
    from tokenizers import processors

    made = byte_level(special=["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, TEMPLATE)
    return tmp_path


def write(folder: Path, template: Any) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def built(folder: Path) -> tuple[TokenizerConfig, Tokenizer]:
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    return config, build_tokenizer(config)


@pytest.mark.parametrize("place", ["settings", "named", "file"])
def test_prompts_match_transformers(folder: Path, place: str) -> None:
    transformers = pytest.importorskip("transformers")
    if place == "named":
        write(folder, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}])
    if place == "file":
        write(folder, None)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    config, tokenizer = built(folder)
    text = find_chat_template(config, None)(MESSAGES)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert chat_tokens(tokenizer, text) == list(expected)
    assert chat_tokens(tokenizer, text).count(256) == 1  # <s> once


def test_the_template_is_saved_with_the_checkpoints(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (folder / "chat_template.jinja").write_text("kept")
    run = tmp_path_factory.mktemp("run")
    keep_tokenizer(built(folder)[0], run)
    assert find_chat_template(built(run / "tokenizer")[0], None)(MESSAGES) == "kept"


def test_missing_wrong_and_refusing_templates_are_reported(folder: Path) -> None:
    write(folder, None)
    with pytest.raises(ValueError, match=r"has no chat template.*give one with --chat-template FILE"):
        find_chat_template(built(folder)[0], None)
    for source, message in (
        ("{% for %}", "line 1"),
        ("{{ missing.role }}", "refuses the messages"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "append.*unsafe"),
    ):
        (folder / "chat.jinja").write_text(source)
        with pytest.raises(ValueError, match=message):
            find_chat_template(built(folder)[0], folder / "chat.jinja")(MESSAGES)
    (folder / "chat.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="cannot be read"):
        find_chat_template(built(folder)[0], folder / "chat.jinja")


@pytest.mark.parametrize(
    "templates", [[5], [{"template": "x"}], [{"name": {}, "template": "x"}], [{"name": "default"}]]
)
def test_a_malformed_list_of_templates_is_refused(folder: Path, templates: Any) -> None:
    write(folder, templates)
    with pytest.raises(
        ValueError, match=r"tokenizer_config.json: chat_template\[0\] must be an object .*--chat-template"
    ):
        find_chat_template(built(folder)[0], None)


def test_a_template_file_that_is_not_text_is_named(folder: Path) -> None:
    write(folder, None)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=rf"chat template {folder}/chat_template.jinja: cannot be read"):
        find_chat_template(built(folder)[0], None)


def test_a_text_far_longer_than_the_messages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chat template of test renders 3,000,000 characters for messages of \d+;"):
        ChatTemplate("{{ 'a b ' * 750000 }}", {}, "test")(MESSAGES)
    long = [{"role": "user", "content": "a b " * 750_000}]
    assert len(ChatTemplate("{{ messages[0].content }}", {}, "test")(long)) == 3_000_000


WRONG = [[], "hi", [5], [{"role": "user"}], [{"content": "a"}], [{"role": "user", "content": [{}]}]]


@pytest.mark.parametrize("messages", WRONG)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ValueError, match="messages"):
        ChatTemplate("x", {}, "test")(messages)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set ns = namespace(x='x' * 1000) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
HOSTILE = [
    (LOOPS, 0.5, "takes more than 0.5 seconds; does it have nested loops"),
    ("{{ (messages | length * 9) ** 999999999 }}", 0.5, "takes more than 0.5 seconds"),
    (DOUBLES, 60.0, "refuses the messages: it needs more than 1024 MiB of memory"),
    ("{{ 'x' * (messages | length) * 10000000000 }}", 60.0, "it needs more than 1024 MiB of memory"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 60.0, "refuses the messages: maximum recursion"),
]


@pytest.mark.parametrize(("source", "seconds", "why"), HOSTILE)
def test_rendering_has_limits_of_time_and_memory(
    source: str, seconds: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_worker, "SECONDS", 60.0)
    template = ChatTemplate("{% if messages[0].content == 'go' %}" + source + "{% endif %}fine", {}, "theirs")
    monkeypatch.setattr(template_worker, "SECONDS", seconds)
    with pytest.raises(ValueError, match=f"chat template of theirs .*{why}"):
        template([{"role": "user", "content": "go"}])
    monkeypatch.setattr(template_worker, "SECONDS", 60.0)
    assert template([{"role": "user", "content": "a"}]) == "fine", "where needed, by another process"


def test_compiling_a_template_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_worker, "SECONDS", 1.0)
    with pytest.raises(ValueError, match="chat template of theirs takes more than 1 seconds"):
        ChatTemplate("{{ 9 ** 999999999 }}", {}, "theirs")
