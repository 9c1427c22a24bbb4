"""Pipeline schedules without torch: which rank computes which stage and microbatch in which order, and what that costs."""
