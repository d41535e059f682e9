"""The part that engine processes of both roles share: sessions of several owners, and the loop."""
