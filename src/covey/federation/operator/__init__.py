"""The operator's side: settings, the agreement of the sites, exchanges with them, a run and its report."""
