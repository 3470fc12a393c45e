"""Ids of clients and their groups: who belongs to whom, and which model answers for an unseen id."""
