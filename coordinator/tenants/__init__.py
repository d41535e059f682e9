"""Tenants: API keys, quotas, and quotas shared among coordinators."""
