"""What runs a fleet for real: the Kubernetes controller, and files for other ways."""
