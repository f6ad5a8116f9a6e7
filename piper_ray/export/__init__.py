"""Plans in the forms that runtimes read, and the way back."""
