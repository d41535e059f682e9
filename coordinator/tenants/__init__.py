"""Who calls, and what they are allowed: API keys, quotas, and quotas shared among coordinators."""
