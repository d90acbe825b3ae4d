"""A server between organisations: sessions, jobs, its peers, its status."""
