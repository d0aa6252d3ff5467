"""The engine that trains shard by shard: devices by name, runners under a cap, plans.

Devices: 'auto' is every GPU, or the CPU where there is none; else words of a cluster's shorthand for devices
of this machine, such as 'cuda:0', 'cuda:0-8GB', 'cpu' or 'cpu#1-4GB' (a simulated device with memory of its
own), in a list or separated by commas. The memory after the dash caps that device as `memory_cap` caps all of
them; where both are given, the smaller one holds.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from loadmaster.cluster.device_words import DeviceWord
from loadmaster.cluster.local import format_local_device, parse_local_devices
from loadmaster.core.errors import DeviceMemoryError, InputError, UnknownNameError
from loadmaster.shards.device.host_bytes import free_host_bytes
from loadmaster.shards.model.built_model import BuiltModel
from loadmaster.shards.model.loaders import blame_loader
from loadmaster.shards.model.shared_storage import ParameterOwners
from loadmaster.shards.plan.rates import Rates
from loadmaster.shards.plan.shard_plan import PlannedTrial, ShardPlan
from loadmaster.shards.plan.sizes import Sizes, measure_sizes
from loadmaster.shards.plan.unit_order import count_forwards
from loadmaster.shards.spec.engine import Runner, TrialPlan
from loadmaster.shards.spec.trial import Trial

_OF_A_GPU = 0.9  # of its memory, where no cap is given
_OF_THE_HOST = 0.25
_PLACEMENTS = ("auto", "device", "host", "hybrid")


@dataclass
class ShardEngine:
    """Opens devices and runners of this package."""

    memory_cap_bytes: int | None = None
    host_cap_bytes: int | None = None
    optimizer_placement: str = "auto"
    rates: Rates | None = None  # None: typical ones
    share: int = 1  # trials that are to stand on a device at once
    keeps_weights: bool = False  # a model with weights waits from planning to training: of one trial alone
    _built: dict[str, tuple[PlannedTrial, BuiltModel]] = field(
        default_factory=dict, init=False, repr=False
    )  # planned in this process, and not opened yet
    _here: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # of this process
    _groups: dict[int, Any] = field(
        default_factory=dict, init=False, repr=False
    )  # by device, of this process
    _sketches: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # [trial] on a backbone
    _owners: ParameterOwners = field(default_factory=ParameterOwners, init=False, repr=False)
    _alone: set[str] = field(default_factory=set, init=False, repr=False)  # of them, those no group takes
    _lent_bytes: dict[str, int] = field(default_factory=dict, init=False, repr=False)  # held by another trial
    _step_s: dict[str, float] = field(default_factory=dict, init=False, repr=False)  # [trial] here
    _backbones: dict[str, str] = field(default_factory=dict, init=False, repr=False)  # [trial] hash of it

    def __post_init__(self) -> None:
        """Refuse an unknown placement before anything is built."""
        if self.optimizer_placement not in _PLACEMENTS:
            raise UnknownNameError("optimizer_placement", self.optimizer_placement, _PLACEMENTS)

    def __getstate__(self) -> dict[str, Any]:
        """Threads and models stay in their process."""
        here: dict[str, Any] = {name: {} for name in ("_built", "_here", "_groups", "_sketches")}
        return {**self.__dict__, **here, "_owners": ParameterOwners()}

    def device_names(self, devices: str | Sequence[str]) -> list[str]:
        """The devices that are meant; no GPU is touched."""
        if devices == "auto":
            count = torch.cuda.device_count()
            return [f"cuda:{at}" for at in range(count)] or ["cpu"]
        names = []
        for word in parse_local_devices(devices):
            names.append(format_local_device(word))
            if word.kind != "cpu" and not torch.cuda.device_count():
                raise InputError(f"there is no {names[-1]} here: torch sees no GPU; use devices='cpu'")
        return names

    def open_device(self, name: str) -> Any:
        """The device, with its arena and streams, in this process."""
        from loadmaster.shards.device.cpu_device import CpuDevice
        from loadmaster.shards.device.cuda_device import CudaDevice

        (word,) = parse_local_devices([name])
        cap_bytes = self._cap_bytes(name)
        if word.kind == "cpu":
            return CpuDevice(format_local_device(replace(word, size="")), cap_bytes=cap_bytes)
        return CudaDevice(_require_gpu(word), cap_bytes=cap_bytes, trace=True)

    def _cap_bytes(self, name: str) -> int:
        (word,) = parse_local_devices([name])
        caps = [cap for cap in (self.memory_cap_bytes, word.memory_bytes) if cap is not None]
        if caps:
            return min(caps)
        if word.kind == "cpu":
            return int(_OF_THE_HOST * free_host_bytes())
        return int(_OF_A_GPU * torch.cuda.get_device_properties(_require_gpu(word)).total_memory)

    def open_runner(self, trial: Trial, device: Any, plan: TrialPlan | None = None) -> Runner:
        """A trial at its beginning; updates of all trials of a process share one thread and one order.

        The plan is executed as it was made, on a device like the one it was made for; another device (the
        study's plan is for the one with the least room) gets a plan of its own.
        """
        from loadmaster.shards.device.update_thread import HostUpdater
        from loadmaster.train.backbone.frozen_weights import has_backbone
        from loadmaster.train.backbone.group_runner import GroupRegistry
        from loadmaster.train.execute.runner import open_built_runner

        planned: PlannedTrial | None = None if plan is None else plan.detail
        built = self._take_built(trial, device, planned)
        if trial.name in self._backbones and trial.name not in self._alone and has_backbone(built.chain):
            groups = self._groups.setdefault(id(device), GroupRegistry())
            try:
                return groups.runner(built, device)
            except DeviceMemoryError:  # it was planned for another device, or not at all
                built = self._take_built(trial, device, planned)  # anew: a group may have moved its weights
        if "updater" not in self._here:
            self._here |= {"updater": HostUpdater(), "sequence": itertools.count()}
        suits = planned is not None and planned.suits(device.torch_device.type, device.arena.cap_bytes)
        return open_built_runner(
            built,
            device=device,
            plan=planned.plan if planned is not None and suits else None,
            optimizer_placement=self.optimizer_placement,
            rates=self.rates,
            share=self.share,
            **self._here,
        )

    def _take_built(self, trial: Trial, device: Any, planned: PlannedTrial | None) -> BuiltModel:
        """The model that was built for planning, if it waits in this process; else it is built again."""
        from loadmaster.shards.model.built_model import build_trial

        where = device.torch_device
        waiting, built = self._built.pop(trial.name, (None, None))
        if planned is None or planned.device_type != where.type:
            return build_trial(trial, device=where)
        if built is not None and waiting is planned:
            return replace(built, trial=trial, device=where)
        return build_trial(trial, device=where, known=planned.record)

    def forget_built(self) -> None:
        """Let go of models that were built for planning and not opened, and of groups on closed devices."""
        self._built.clear()
        self._groups.clear()

    def plan_trial(self, trial: Trial, device_names: Sequence[str]) -> TrialPlan:
        """Shards, peak, bytes and time of a trial on the device with the least room; trains nothing."""
        from loadmaster.shards.model.built_model import build_trial
        from loadmaster.shards.plan.partition import make_plan
        from loadmaster.shards.plan.rates import default_rates
        from loadmaster.train.backbone.group_forecast import sketch_trial

        name = min(device_names, key=self._cap_bytes)
        where = torch.device("cuda" if name.startswith("cuda") else "cpu")
        cap_bytes, rates = self._cap_bytes(name), self.rates or default_rates(where, trial.precision)
        built = build_trial(trial, device=where)
        self._owners.claim(trial.name, built.chain)
        plan = make_plan(
            built,
            cap_bytes=cap_bytes,
            rates=rates,
            optimizer_placement=self.optimizer_placement,
            share=self.share,
        )
        sizes = measure_sizes(built)
        state_bytes = sum(sizes.pinned_bytes)
        shared_bytes = self._note_backbone(trial, built)
        count = count_steps(trial, built.record.num_batches)
        buffer_bytes = sum(buffer.nbytes for buffer in built.chain.buffers)
        planned = PlannedTrial(plan, where.type, cap_bytes, built.record)
        kept = built.empty or self.keeps_weights
        if trial.name in self._backbones:
            backbone = self._backbones[trial.name]
            self._sketches[trial.name] = sketch_trial(built, sizes, backbone, cap_bytes=cap_bytes, kept=kept)
        # One without weights waits at no cost. Those with weights would fill the host's memory, so that each
        # of several trials is built again when it is its turn.
        self._built.pop(trial.name, None)
        if kept:
            self._built[trial.name] = planned, replace(built, batch=None, optimizer=None)
        return TrialPlan(
            trial=trial.name,
            num_steps=count,
            step_s=self._predict_step_s(built, plan, sizes, where),
            is_measured=self.rates is not None or where.type == "cpu",
            host_bytes=state_bytes + sum(sizes.copy_bytes) + sum(sizes.grad_bytes) - shared_bytes,
            state_bytes=state_bytes + buffer_bytes - shared_bytes,
            peak_bytes=plan.peak_bytes,
            num_shards=plan.layout.num_shards,
            bytes_up=int(plan.work.up_bytes),
            bytes_down=int(plan.work.down_bytes),
            bound_by=plan.limit.bound_by,
            load_s=(plan.load_bytes if self.share == 1 else plan.slot_bytes) / rates.up_bytes_per_s,
            options=built.probe.options,
            built_on="meta" if built.empty else "cpu",
            note=built.record.note,
            detail=planned,
        )

    def _predict_step_s(self, built: BuiltModel, plan: ShardPlan, sizes: Sizes, where: torch.device) -> float:
        """The time of a step at this machine's own pace, if known; the plan does not depend on it."""
        if self.rates is not None or where.type != "cpu":
            return plan.step_s
        from loadmaster.train.execute.machine_pace import measure_machine_pace
        from loadmaster.train.execute.timed_step import predict_step_s, time_plain_step

        trial, pace, plain = built.trial, measure_machine_pace(), time_plain_step(built)
        if plain is not None:
            self._step_s[trial.name] = predict_step_s(built, plan, sizes, plain, pace)
            return self._step_s[trial.name]
        num_passes = 2 if plan.layout.num_shards > 1 else 1  # each shard but the last runs forward twice
        self._step_s[trial.name] = pace.predict_step_s(
            num_ops=trial.accumulate * (sum(built.facts.num_ops) * (1 + num_passes) / 2),
            num_shards=plan.layout.num_shards,
            flops=plan.work.flops,
        )
        return self._step_s[trial.name]

    def plan_groups(self, plans: Sequence[TrialPlan], device_names: Sequence[str]) -> list[TrialPlan]:
        """The plans of all trials, those on one frozen backbone as they will run: as a group."""
        from loadmaster.shards.plan.rates import default_rates
        from loadmaster.train.backbone.group_forecast import plan_together

        name = min(device_names, key=self._cap_bytes)
        where = torch.device("cuda" if name.startswith("cuda") else "cpu")
        found = plan_together(
            plans,
            self._sketches,
            lent_bytes=self._lent_bytes,
            num_devices=len(device_names),
            cap_bytes=self._cap_bytes(name),
            on_gpu=where.type == "cuda",
            rates=self.rates or default_rates(where),
        )
        self._alone = {each.trial for each in found if each.trial in self._sketches and not each.is_grouped}
        self._sketches.clear()  # they hold models that are to be trained
        return [
            replace(each, step_s=self._step_s[each.trial])
            if each.is_grouped and each.trial in self._step_s
            else each
            for each in found
        ]

    def _note_backbone(self, trial: Trial, built: Any) -> int:
        """Remember a trial with a frozen backbone; gives the bytes of it that an earlier trial holds."""
        from loadmaster.train.backbone.frozen_weights import frozen_numbers, has_backbone, hash_frozen

        if not has_backbone(built.chain) or count_forwards(trial, built.facts) > 1:
            return 0  # a group passes once for all micro-batches, and would draw in another order
        found = f"{hash_frozen(built.chain)} {trial.precision}"  # a group reads it in one dtype
        others = {each for name, each in self._backbones.items() if name != trial.name}
        self._backbones[trial.name] = found
        if found not in others:
            return 0
        lent = sum(built.chain.parameters[n].nbytes for n in frozen_numbers(built.chain))
        self._lent_bytes[trial.name] = lent
        return lent


def _require_gpu(word: DeviceWord[str]) -> str:
    """The GPU that is meant, as torch names it."""
    name, count = word.kind if ":" in word.kind else f"{word.kind}:0", torch.cuda.device_count()
    if int(name.partition(":")[2]) >= count:
        has = ", ".join(f"cuda:{at}" for at in range(count)) or "no GPU"
        raise InputError(f"this machine has no {name}; it has {has}")
    return name


def count_steps(trial: Trial, num_batches: int | None) -> int:
    """Optimizer steps of a trial; data without a length is opened once more and counted."""
    if num_batches is None:
        most = None if trial.max_steps is None else trial.max_steps * trial.accumulate  # it may have no end
        with blame_loader(trial.name):
            num_batches = sum(1 for _ in itertools.islice(iter(trial.data()), most))
    total = -(-num_batches // trial.accumulate) * trial.epochs
    return total if trial.max_steps is None else min(total, trial.max_steps)
