"""Tiny models of every decoder class of transformers, played through the engine."""
