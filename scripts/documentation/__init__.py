"""The documentation: its site, what of it is generated, its pictures, and its examples, which are run."""
