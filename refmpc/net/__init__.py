"""How parties reach each other: frames, sockets, TLS, greetings, the first meeting, emulated networks."""
