"""Ten minutes on a GPU: what is checked and measured first, in order, by one command that can go on in a later slot."""
