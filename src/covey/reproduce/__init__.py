"""The paper's studies, their tables and figures."""
