"""One module a subcommand. Each has ``measure(job) -> Report``, called on every rank.

``startup`` starts jobs of its own and has ``measure(options) -> Report`` instead.
"""
