"""What the engine processes of both roles share: sessions of several owners, and the loop of poll, step and send."""
