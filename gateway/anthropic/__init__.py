"""Anthropic's Messages API: a request becomes a chat, its answer becomes content blocks. See routes/messages.py."""
