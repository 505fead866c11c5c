"""GPT-style decoders, from GPT-2 to Llama, Qwen and Mistral: one model class and its configuration."""
