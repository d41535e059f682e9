"""Ten minutes on a GPU: checks and measurements in order of importance, by one command that a later slot resumes."""
