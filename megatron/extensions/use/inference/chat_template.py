"""Rendering of chat messages into a prompt with the tokenizer's Jinja template.

A template may come from an untrusted checkpoint. Templates therefore run in a sandbox, in a process with time and
memory limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.json_text import parse_json
from megatron.core.tokenizers import Tokenizer, with_local_files
from megatron.extensions.data.tokenizers.huggingface import tokenizer_file
from megatron.extensions.data.tokenizers.special_tokens import role_texts
from megatron.extensions.use.inference.generation import Engine, Generation, Request
from megatron.extensions.use.inference.model import LoadedModel
from megatron.extensions.use.inference.template_worker import TemplateWorker

Message = Mapping[str, object]
"""Chat message, such as {"role": "user", "content": "..."}."""

LONGEST_TEXT = 1 << 18
"""Limit on the length of a rendered prompt: `LONGEST_TEXT` characters more than four times the length of the messages.
The limit exists because tokenizing a million characters takes seconds."""


class ChatTemplate:
    """Compiled chat template, with the special tokens that the template can refer to by name."""

    def __init__(self, source: str, tokens: Mapping[str, str], origin: str) -> None:
        """Compile the template `source`. Error messages mention `origin` as the source of the template. Raises
        ValueError if `source` is not a valid template."""
        self.origin, self.tokens = origin, dict(tokens)
        self._worker = TemplateWorker(source)
        try:
            found = self._worker.compile()
        except ValueError as error:
            raise ValueError(f"chat template of {origin} {error}") from None
        if "wrong" in found:
            raise ValueError(f"chat template of {origin}: line {found['line']}: {found['wrong']}")

    def __call__(self, messages: Sequence[Message], **more: object) -> str:
        """Render the prompt for the assistant's answer. Raises ValueError if the template refuses the messages, exceeds
        the time or memory limit, or renders a prompt far longer than the messages."""
        checked_messages(messages)
        values = {"messages": list(map(dict, messages)), "add_generation_prompt": True, **self.tokens, **more}
        try:
            found = self._worker.render(values)
        except ValueError as error:
            raise ValueError(f"chat template of {self.origin} {error}") from None
        if "wrong" in found:
            raise ValueError(f"chat template of {self.origin} refuses the messages: {found['wrong']}")
        text, given = str(found["text"]), len(json.dumps(values))
        if len(text) > LONGEST_TEXT + 4 * given:
            raise ValueError(
                f"chat template of {self.origin} renders {len(text):,} characters for messages of {given:,}; at "
                f"most {LONGEST_TEXT + 4 * given:,} are supported: use another template"
            )
        return text


def find_chat_template(config: TokenizerConfig, file: Path | None) -> ChatTemplate:
    """Return the template in `file`, which is the value of --chat-template. If no file is given, return the tokenizer's
    template. Raises ValueError if neither provides a template."""
    settings, folder = _settings(config)
    known = {} if folder is None else role_texts(folder)
    if file is not None:
        return ChatTemplate(_text_of(file, f"--chat-template {file}"), known, str(file))
    beside = None if folder is None else folder / "chat_template.jinja"
    source = settings.get("chat_template")
    if beside is not None and beside.is_file():
        source = _text_of(beside, f"chat template {beside}")
    if isinstance(source, list):
        source = _default_of(source, f"{folder}/tokenizer_config.json")
    if not isinstance(source, str):
        where = f"tokenizer in {folder}" if folder else f"--tokenizer-type {config.tokenizer_type}"
        raise ValueError(
            f"{where} has no chat template in chat_template.jinja or in chat_template of tokenizer_config.json; "
            "give one with --chat-template FILE, or use prompts in place of messages"
        )
    return ChatTemplate(source, known, str(folder))


def _text_of(file: Path, named: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{named}: cannot be read ({error})") from None


def _default_of(templates: Sequence[object], file: str) -> object:
    """Return the template named `default` from a list of named templates."""
    found = {}
    for number, each in enumerate(templates):
        if not (isinstance(each, dict) and isinstance(each.get("name"), str) and "template" in each):
            raise ValueError(
                f'{file}: chat_template[{number}] must be an object {{"name": ..., "template": ...}}; correct it, or '
                "give a template with --chat-template FILE"
            )
        found[each["name"]] = each["template"]
    return found.get("default")


def chat_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize a rendered template. No special tokens are added to the text, because the chat template already contains
    them."""
    ids = tokenizer.tokenize(text)
    around = getattr(tokenizer, "added_around", None)
    before, behind = around() if around is not None else ([], [])
    return ids[len(before) : len(ids) - len(behind)]


def checked_messages(messages: object) -> Sequence[Message]:
    """Check the chat messages of a request, and return them. Raises ValueError if `messages` is not a list or is empty,
    or if a message lacks a role or a content."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError('messages must be a list of {"role": ..., "content": ...}, at least one')
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}] must have a role, such as user")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        texts = all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts)
        if not (isinstance(content, str) or (parts and texts)):
            raise ValueError(f"messages[{number}] must have a content that is a text, or a list of texts")
    return messages


def plain_messages(messages: object) -> list[dict[str, object]]:
    """Convert the content of each chat message to a string. If the content is a list of text parts, the parts are
    joined."""
    return [{**message, "content": _joined(message["content"])} for message in checked_messages(messages)]


def _joined(content: object) -> object:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _settings(config: TokenizerConfig) -> tuple[dict[str, object], Path | None]:
    """Return the content of a Hugging Face tokenizer's tokenizer_config.json, and the folder of the file. The content
    is empty if the file does not exist."""
    config = with_local_files(config)
    if config.tokenizer_type != "HuggingFaceTokenizer" or config.tokenizer_model is None:
        return {}, None
    folder = tokenizer_file(config.tokenizer_model).parent
    file = folder / "tokenizer_config.json"
    return (parse_json(file.read_text(encoding="utf-8")) if file.is_file() else {}), folder


def pieces(engine: Engine, generation: Generation) -> Iterator[str]:
    """Run `engine`, and yield the text of `generation`, a submitted request, piece by piece. A piece is yielded as soon
    as it can no longer change."""
    shown = 0
    while generation.finish_reason is None:
        engine.step()
        yield generation.text[shown:]
        shown = len(generation.text)


def chat(
    model: LoadedModel,
    engine: Engine,
    template: Callable[[Sequence[Message]], str],
    defaults: Request,
    system: str | None,
    ask: Callable[[], str | None],
    show: Callable[[str], None],
) -> None:
    """Run a conversation. `template` renders the messages to a prompt, and `system` is the system message. `ask`
    returns the user's next message, or None to end the conversation. `show` is called with each new piece of an answer
    as soon as it is generated.

    The prompt contains all messages. If the prompt would be too long, the oldest pairs of a user message and an answer
    are omitted.
    """
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages: list[Message] = []
    while (said := ask()) is not None:
        messages.append({"role": "user", "content": said})
        tokens = chat_tokens(model.tokenizer, template([*first, *messages]))
        while len(messages) > 2 and len(tokens) >= engine.longest:
            del messages[:2]
            tokens = chat_tokens(model.tokenizer, template([*first, *messages]))
        generation = engine.submit(replace(defaults, prompt=tokens))
        for piece in pieces(engine, generation):
            show(piece)
        if generation.error is not None:
            show(f"[{generation.error}]")
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": generation.text})
        show("\n")
