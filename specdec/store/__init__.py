"""What coordinators and replicas share: registry, prefix map, journal and quotas, in Redis or in memory."""
