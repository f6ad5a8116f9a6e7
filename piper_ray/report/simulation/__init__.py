"""A simulation in words, as tables, as a document and as a picture."""
