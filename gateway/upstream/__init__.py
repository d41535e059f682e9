"""The coordinators behind a gateway, and what is known of the model they serve."""
