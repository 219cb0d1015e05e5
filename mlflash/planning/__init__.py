"""``mlflash plan``: what each redundancy scheme costs and survives, and how often to save, before a job runs."""
