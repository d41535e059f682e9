"""Structured output. `limits/` checks constraints, at coordinators and replicas. `grammar/` computes the tokens that a
constraint allows next, at targets and drafts.
"""
