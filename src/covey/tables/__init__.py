"""Tables to rows: reading files, formulas and bars, standardising, rows sorted by group and client."""
