"""The `specdec` command: a folder or a file for each sub-command, and what they share. Start reading at `app.py`."""
