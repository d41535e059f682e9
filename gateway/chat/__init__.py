"""Chats between OpenAI's form and the model's: messages to templates, output to content, reasoning and calls. Pure."""
