"""The helper process: the only place that calls the driver's checkpoint verbs."""
