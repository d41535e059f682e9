"""What is compared: deployments of this system, and others on the same weights. Others are optional."""
