"""Text generation from checkpoints under any layout: prompts from files, chat, and an HTTP server.

The training program has no flags for it: tools/generate_text.py and tools/serve.py have their own.

Read `generation.engine` first: it batches requests, and `generation.runner` runs their passes on all ranks. `model`
loads a checkpoint; `openai_api` and `http_server` serve it.
"""
