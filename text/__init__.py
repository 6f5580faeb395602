"""From documents to token ids: reading, downloads, chats, tokenizers, token folders."""
