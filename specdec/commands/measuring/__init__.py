"""Measuring a deployment: requests, the times of their tokens, figures, tables, plots, reports. Several commands do."""
