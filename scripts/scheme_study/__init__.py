"""What schemes found from a layer's operators are worth: the tables of docs/explanation/schemes.md."""
