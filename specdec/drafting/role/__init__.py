"""Drafting with a model: a role over an engine, for a draft service, and for a target that drafts for itself."""
