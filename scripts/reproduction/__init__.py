"""The paper's evaluation (NeurIPS 2021, section 5 and appendices): a module for each figure or table."""
