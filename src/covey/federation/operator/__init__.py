"""The operator: what sites agree on, the coordinator, a whole run and its report."""
