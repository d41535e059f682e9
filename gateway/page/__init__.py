"""The page at `/`: one file, assembled when a gateway starts, with its content security policy."""
