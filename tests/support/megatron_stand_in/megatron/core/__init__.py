from types import SimpleNamespace

mpu = SimpleNamespace()
"""`treetune.trainers.slime.weights` puts one process in its place."""
