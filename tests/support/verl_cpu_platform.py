"""A CPU as a platform of verl 0.9, by verl's own way for plugins: `VERL_USE_EXTERNAL_MODULES=verl_cpu_platform`.

verl is made for accelerators. Here Ray counts one GPU that nobody has, torch's processes talk by gloo, and vLLM is its
build for CPUs. So a test takes real steps: sampling, gradients, and new weights in the engine.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform


class Device(ModuleType):
    """`torch.cpu` as verl uses `torch.cuda`; to what only a device knows it answers with nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        answers = {
            "mem_get_info": lambda *_: (8 << 30, 16 << 30),
            "get_device_name": lambda *_: "CPU",
            "is_available": lambda: False,
            "get_rng_state": torch.get_rng_state,
            "set_rng_state": torch.set_rng_state,
        }
        return getattr(torch.cpu, name, None) or answers.get(name) or (lambda *_, **__: 0)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = Device("cpu_device")

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def _nothing(self, *_):
        """What only a device does."""

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing


def init_process_group(backend=None, *arguments, **options):
    """verl asks for one backend for the CPU and one for the device, and torch refuses two for the same."""
    backend = "cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend
    return _init_process_group(backend, *arguments, **options)


_init_process_group = torch.distributed.init_process_group
torch.distributed.init_process_group = init_process_group


def keep_weights():
    """vLLM for CPUs packs the weights of linear layers when they are loaded, and has none left to be replaced by new
    ones. This keeps them as they are."""
    import vllm.model_executor.layers.utils as utils

    def dispatch(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def wait_without_spinning():
    """vLLM's workers look for their next batch without a pause, for a second: here, others need the CPU."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.wait = lambda self, timeout_ms=None: time.sleep(0.0005)


set_platform(CpuPlatform())
if "VERL_REPLICA_RANK" in os.environ:  # which verl gives to the processes of its engine
    keep_weights()
    wait_without_spinning()
