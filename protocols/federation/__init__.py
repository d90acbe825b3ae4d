"""``federation.toml``: its schema, its reader, its template, and the plan that follows from it."""
