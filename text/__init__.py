"""From documents to token ids: reading, downloads, the countries, tokenizers, token folders."""
