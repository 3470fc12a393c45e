"""Ids of clients and clusters, the hierarchy, and the model that predicts for an unseen id."""
