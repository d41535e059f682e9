"""Starts services of tests without their imports, which cost an engine six CPU seconds, beside 0.2 for its model.

A *template* is a process that has imported only third-party packages, and forks itself for every requested process. The
forked process is a child of the requester, with the arguments, environment, files and session that `subprocess.Popen`
would have given it. It imports this repository's packages itself.

Commands (`start_command`) are forked, too, with all that they start. Packages and what the chart renders are executed.
"""
