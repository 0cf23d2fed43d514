"""`fleetctl sim`: the fleet that serves, on another clock, against a model of its devices' time."""
