"""One file for each pipeline schedule; `all_schedules.py` lists them."""
