"""Generation of text from checkpoints at any layout: prompts from files, chat, and an HTTP server.

No flags of the training program: tools/generate_text.py and tools/serve.py have their own.

Read `generation.engine` first: it batches requests, whose passes `generation.runner` runs on all ranks. `model` loads a
checkpoint for them, `openai_api` and `http_server` serve them.
"""
