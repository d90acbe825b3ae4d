"""A server between organisations: sessions, spool, tasks, its peers and its live clients."""
