"""Structured logs, written by a thread."""
