"""GPT-style decoders: from GPT-2 to Llama, Qwen and Mistral, as one model and its configuration."""
