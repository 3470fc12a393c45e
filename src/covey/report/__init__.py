"""Tables for the terminal and figures; nothing in the core imports this."""
