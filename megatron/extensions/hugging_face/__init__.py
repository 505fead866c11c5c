"""Exchange of weights and configurations with Hugging Face model folders."""
