"""The coordinators behind a gateway, and the texts of their model's tokens."""
