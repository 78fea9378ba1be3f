"""Known failures and what reads them: lint, doctor and diagnose."""
