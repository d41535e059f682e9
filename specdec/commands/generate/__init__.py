"""`specdec generate`: streams a completion to the terminal."""
