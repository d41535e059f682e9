"""Several coordinator processes behind one port, started and kept running by a supervisor."""
