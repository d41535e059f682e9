"""Measuring deployments: requests and when their tokens come, figures, tables, plots and reports."""
