"""Trying a trained model: prompts from files, chat, and an HTTP server, over a checkpoint at any layout."""
