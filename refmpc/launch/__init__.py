"""Running a program at three parties: as threads or as processes."""
