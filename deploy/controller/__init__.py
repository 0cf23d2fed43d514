"""The Kubernetes controller: makes a cluster be what an InferenceFleet says. See docs/kubernetes.md."""
