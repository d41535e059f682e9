"""Drafters that need no weights: each proposes trees of tokens for sessions, from what it has seen of their text."""
