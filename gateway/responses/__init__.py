"""OpenAI's Responses API: a request becomes a chat, its answer becomes output items. See routes/responses.py."""
