"""What Treetune touches of skyrl-gym 0.4, so that the fast tests need no trainer. The slow suite has the real one."""

from skyrl_gym import envs
from skyrl_gym.core import Env
from skyrl_gym.envs.registration import make, register, registry

__all__ = ["Env", "envs", "make", "register", "registry"]
