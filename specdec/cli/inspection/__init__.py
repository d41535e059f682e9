"""Commands that look into a deployment: debug, audit, doctor."""
