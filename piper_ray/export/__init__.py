"""Writes plans in the forms that runtimes read, and reads layouts back."""
