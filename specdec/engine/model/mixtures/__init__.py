"""Mixtures of experts: row-invariant products and routers on the CPU, and their part of the self-test."""
