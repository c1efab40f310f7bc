# SPDX-License-Identifier: Apache-2.0
"""Kernels that configure themselves: selection, caches, autotuning, labels and offline tuning."""

import importlib
import types
import typing

from ejkernel.ops.config.cache import ConfigCache as ConfigCache
from ejkernel.ops.config.cache import overlay_cache as overlay_cache
from ejkernel.ops.config.persistent import PersistentCache as PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy as AutotunePolicy
from ejkernel.ops.config.policy import StalePolicy as StalePolicy
from ejkernel.ops.config.policy import policy_override as policy_override
from ejkernel.ops.config.selection import ConfigSelectorChain as ConfigSelectorChain
from ejkernel.ops.config.selection import Resolution as Resolution
from ejkernel.ops.config.spaces.space import ConfigSpace as ConfigSpace
from ejkernel.ops.core.bucketing import bucketed as bucketed
from ejkernel.ops.core.invocation import Invocation as Invocation
from ejkernel.ops.core.invocation import default_key_builder_with_sharding as default_key_builder_with_sharding
from ejkernel.ops.core.kernel import Kernel as Kernel
from ejkernel.ops.core.sharding.rule import ShardingRule as ShardingRule
from ejkernel.ops.core.sharding.split import CallPart as CallPart
from ejkernel.ops.core.types import Cfg as Cfg
from ejkernel.ops.core.types import ConfigKey as ConfigKey
from ejkernel.ops.core.types import Cost as Cost
from ejkernel.ops.core.types import Out as Out
from ejkernel.ops.errors import AgreementError as AgreementError
from ejkernel.ops.errors import AgreementWarning as AgreementWarning
from ejkernel.ops.errors import ArgumentError as ArgumentError
from ejkernel.ops.errors import ArgumentWarning as ArgumentWarning
from ejkernel.ops.errors import CacheWarning as CacheWarning
from ejkernel.ops.errors import CallError as CallError
from ejkernel.ops.errors import CandidateError as CandidateError
from ejkernel.ops.errors import ConfigError as ConfigError
from ejkernel.ops.errors import DescriptionError as DescriptionError
from ejkernel.ops.errors import DeviceLostError as DeviceLostError
from ejkernel.ops.errors import EjkernelError as EjkernelError
from ejkernel.ops.errors import EjkernelWarning as EjkernelWarning
from ejkernel.ops.errors import GradientError as GradientError
from ejkernel.ops.errors import GradientWarning as GradientWarning
from ejkernel.ops.errors import KernelCheckError as KernelCheckError
from ejkernel.ops.errors import KernelError as KernelError
from ejkernel.ops.errors import KernelWarning as KernelWarning
from ejkernel.ops.errors import NoConfigError as NoConfigError
from ejkernel.ops.errors import OfflineWarning as OfflineWarning
from ejkernel.ops.errors import SerializationError as SerializationError
from ejkernel.ops.errors import SettingsWarning as SettingsWarning
from ejkernel.ops.errors import ShardingWarning as ShardingWarning
from ejkernel.ops.errors import TuningError as TuningError
from ejkernel.ops.errors import TuningWarning as TuningWarning
from ejkernel.ops.errors import UnstableKeyError as UnstableKeyError
from ejkernel.ops.errors import UnstableKeyWarning as UnstableKeyWarning
from ejkernel.ops.errors import UnsupportedError as UnsupportedError
from ejkernel.ops.execution.batch import pmap_with_config as pmap_with_config
from ejkernel.ops.execution.batch import vmap_with_config as vmap_with_config
from ejkernel.ops.execution.executor import ConfigChooser as ConfigChooser
from ejkernel.ops.execution.executor import Executor as Executor
from ejkernel.ops.execution.executor import default_executor as default_executor
from ejkernel.ops.execution.executor import set_default_executor as set_default_executor
from ejkernel.ops.functions import tune as tune
from ejkernel.ops.implementation import Implementation as Implementation
from ejkernel.ops.implementation import Implementations as Implementations
from ejkernel.ops.implementation import LazyImplementation as LazyImplementation
from ejkernel.ops.implementation import NoParams as NoParams
from ejkernel.ops.implementation import OperationCall as OperationCall
from ejkernel.ops.implementation import OperationConfig as OperationConfig
from ejkernel.ops.operation import Operation as Operation
from ejkernel.ops.registry import get_invocations as get_invocations
from ejkernel.ops.registry import missed as missed
from ejkernel.ops.registry import record_invocation as record_invocation
from ejkernel.ops.registry import recording as recording
from ejkernel.ops.utils.datacarrier import BwdParams as BwdParams
from ejkernel.ops.utils.datacarrier import FwdParams as FwdParams
from ejkernel.ops.utils.fingerprint import device_fingerprint as device_fingerprint
from ejkernel.ops.utils.fingerprint import device_kind as device_kind
from ejkernel.ops.utils.fingerprint import get_device_platform as get_device_platform
from ejkernel.ops.utils.fingerprint import sharding_fingerprint as sharding_fingerprint
from ejkernel.ops.utils.meta import LABEL_RE as LABEL_RE
from ejkernel.ops.utils.meta import extract_labels_from_hlo_text as extract_labels_from_hlo_text
from ejkernel.ops.utils.meta import find_labels_in_lowered as find_labels_in_lowered
from ejkernel.ops.utils.meta import label as label
from ejkernel.ops.utils.meta import labels_to_configs as labels_to_configs
from ejkernel.ops.utils.storage.serialize import from_json as from_json
from ejkernel.ops.utils.storage.serialize import stable_json as stable_json
from ejkernel.ops.utils.storage.serialize import to_json as to_json
from ejkernel.ops.utils.values.nameable import nameable as nameable

if typing.TYPE_CHECKING:
    from ejkernel.ops.autotuner.fleet.ray_executor import RayExecutor as RayExecutor
    from ejkernel.ops.autotuner.measure.measurement import Measurement as Measurement
    from ejkernel.ops.autotuner.measure.measurement import benchmark as benchmark
    from ejkernel.ops.autotuner.trials.events import CandidateFinished as CandidateFinished
    from ejkernel.ops.autotuner.trials.events import Event as Event
    from ejkernel.ops.autotuner.trials.events import RoundsFinished as RoundsFinished
    from ejkernel.ops.autotuner.trials.events import SearchFinished as SearchFinished
    from ejkernel.ops.autotuner.trials.events import SearchStarted as SearchStarted
    from ejkernel.ops.autotuner.trials.events import WorkerRestarted as WorkerRestarted
    from ejkernel.ops.autotuner.trials.events import on_event as on_event
    from ejkernel.ops.autotuner.trials.outcome import AutotuneData as AutotuneData
    from ejkernel.ops.autotuner.trials.outcome import Outcome as Outcome
    from ejkernel.ops.autotuner.trials.result import AutotuningResult as AutotuningResult
    from ejkernel.ops.autotuner.trials.result import Entry as Entry
    from ejkernel.ops.autotuner.tuner import Autotuner as Autotuner
    from ejkernel.ops.config.agreement.decisions import ConfigurationDigest as ConfigurationDigest
    from ejkernel.ops.config.agreement.decisions import configuration_digest as configuration_digest
    from ejkernel.ops.execution.offline import autotune as autotune
    from ejkernel.ops.execution.offline import autotune_kernel as autotune_kernel
    from ejkernel.ops.execution.offline import autotune_lowered as autotune_lowered
    from ejkernel.ops.execution.offline import autotune_recorded as autotune_recorded

    # Aliases of names in `ejkernel.testing`, which has their types: this layer does not import from a higher one.
    check_kernel: typing.Any
    CheckReport: typing.Any
    CheckRow: typing.Any

# Tuning and comparing are imported on first use: programs that only run calls do not need them.
_LAZY_BY_MODULE = {
    "autotuner.fleet.ray_executor": "RayExecutor",
    "autotuner.measure.measurement": "Measurement benchmark",
    "autotuner.trials.events": (
        "CandidateFinished Event RoundsFinished SearchFinished SearchStarted WorkerRestarted on_event"
    ),
    "autotuner.trials.outcome": "AutotuneData Outcome",
    "autotuner.trials.result": "AutotuningResult Entry",
    "autotuner.tuner": "Autotuner",
    "config.agreement.decisions": "ConfigurationDigest configuration_digest",
    "execution.offline": "autotune autotune_kernel autotune_lowered autotune_recorded",
}
_LAZY = {name: f"ejkernel.ops.{module}" for module, names in _LAZY_BY_MODULE.items() for name in names.split()}
_LAZY |= dict.fromkeys(("check_kernel", "CheckReport", "CheckRow"), "ejkernel.testing")
__all__ = [
    name
    for name in sorted(globals() | _LAZY)
    if name[0] != "_" and not isinstance(globals().get(name), types.ModuleType)
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        from ejkernel.ops.utils.messages.names import did_you_mean

        end = "" if name.startswith("_") else did_you_mean(name, __all__).rstrip(".")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{end}")
    value: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
