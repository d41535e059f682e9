"""Translate chats: messages for templates, and output to content, reasoning and calls. Pure functions."""
