"""The hooks of the site need the ``docs`` extra, which tests do without."""

collect_ignore_glob = ["hooks/*"]
