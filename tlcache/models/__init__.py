"""From a model's Hugging Face config.json to a shapes document."""
