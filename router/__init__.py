"""The way of a request: ingress, roster, index, cost, flow."""
