"""Rows and columns: data sets, the users' own files, embeddings, public scaling."""
