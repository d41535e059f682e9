"""A session (one choice while it decodes), its request, client stream, statistics and trace."""
