"""The styles: what each is called (`declare`), and one file per family for what it checks and does."""
