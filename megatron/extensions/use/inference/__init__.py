"""Text generation from checkpoints, with any parallel layout. Prompts come from a file, a chat, or requests to an HTTP
server.

The training program has no flags for generation. tools/generate_text.py and tools/serve.py have their own flags.

Read `generation.engine` first, which batches requests. `generation.runner` runs forward passes on all ranks, `model`
loads a checkpoint, and `openai_api` and `http_server` serve the model.
"""
