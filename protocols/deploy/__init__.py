"""Three servers on three hosts: one file that describes the federation, one command per host, and a doctor."""
