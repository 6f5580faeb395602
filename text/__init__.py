"""From documents to token ids: reading, tokenizer, chat template, downloads, countries."""
