"""Text on a terminal as it is generated, and chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron.extensions.inference.chat_template import Message, chat_tokens
from megatron.extensions.inference.generation import Engine, Generation, Request
from megatron.extensions.inference.model import LoadedModel


def pieces(engine: Engine, generation: Generation) -> Iterator[str]:
    """The text of a request that was submitted, as it becomes certain."""
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
    """A conversation: `ask` returns what the user says, None at the end, and `show` gets the answers piece by piece.

    Messages are kept, so the prompt grows; the oldest ones are left out, in pairs, where it would be too long.
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
