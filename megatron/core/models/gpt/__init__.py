"""One model class for GPT-style decoders such as GPT-2, Llama, Qwen and Mistral."""
