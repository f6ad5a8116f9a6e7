"""A plan as one page: what is on it (subject, tables, pictures, assumptions) and how it becomes HTML (render)."""
