"""Commands that look into a deployment, and into its drafting: debug, audit, doctor, drafters."""
