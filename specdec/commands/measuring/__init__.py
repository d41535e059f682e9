"""Measurement of a deployment, for several commands: requests, times of tokens, figures, tables, plots, reports."""
