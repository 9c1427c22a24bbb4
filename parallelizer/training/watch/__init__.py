"""What a run tells of itself: files, a live view, profiles, its first step beside the dry run, and its summary."""
