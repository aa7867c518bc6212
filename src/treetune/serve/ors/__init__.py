"""The Open Reward Standard (ORS): routes on the port of OpenEnv's."""
