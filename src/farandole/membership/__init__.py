"""Who takes part in a job: a coordinator beside the launcher, and its clients in the workers."""
