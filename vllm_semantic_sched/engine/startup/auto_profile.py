"""The profile `auto`: derived at the start of the engine from its model and device. A device that
is not in devices.yaml is measured with torch, in about half a second."""

from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.startup.device_benchmark import measure_device
from vllm_semantic_sched.engine.vllm_api import VllmConfig, describe_hardware, describe_model
from vllm_semantic_sched.policy.config import AUTO, Policy
from vllm_semantic_sched.policy.profile import devices
from vllm_semantic_sched.policy.profile.devices import Device
from vllm_semantic_sched.policy.profile.formula import EngineProfile, load_profile
from vllm_semantic_sched.policy.profile.model_shape import ModelShape
from vllm_semantic_sched.policy.profile.roofline import Roofline

_measured: dict[tuple[object, ...], Device] = {}


def engine_profile(policy: Policy, config: VllmConfig, starting: bool) -> EngineProfile:
    """The profile that a policy names (raises PolicyError if it is invalid), or the derived one
    (errors are logged). `starting`: the engine does not serve yet, so a benchmark may run."""
    if policy.profile != AUTO:
        return load_profile(policy.profile)
    try:
        parallel, facts = describe_model(config)
        model = ModelShape.from_config(**facts)
        device, source = _find_device(config, model, starting)
        return Roofline(model, device, parallel).profile(source)
    except Exception:
        logger.exception("Semantic scheduling: no profile can be derived; the default is used.")
        return load_profile(AUTO)


def _find_device(config: VllmConfig, model: ModelShape, starting: bool) -> tuple[Device, str]:
    """The engine's device, and the origin of its figures."""
    hardware = describe_hardware(config)
    known = devices.recognize(hardware.name)
    if known is not None:
        return known, f"the peak figures of {known.name}"
    key = (hardware.kind, hardware.dtype, model.width, model.inner, model.weights)
    if key not in _measured and starting and hardware.here:
        try:
            _measured[key] = measure_device(
                kind=hardware.kind,
                name=hardware.name,
                dtype=hardware.dtype,
                model=model,
                memory=hardware.memory,
            )
        except Exception as error:
            logger.warning("Semantic scheduling: %s was not measured: %s", hardware.name, error)
    if key in _measured:
        return _measured[key], f"a benchmark of {hardware.name}"
    if hardware.kind == "cpu":
        similar = devices.device_named("cpu")
    else:
        similar = devices.nearest_device(hardware.memory)
    return similar, f"built-in figures for {similar.name} ({hardware.name} is not in devices.yaml)"
