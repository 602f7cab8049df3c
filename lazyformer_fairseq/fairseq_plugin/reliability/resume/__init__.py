"""A resumed run equals the uninterrupted one."""
