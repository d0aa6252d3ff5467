"""What trials on one frozen backbone will take together, before they start: the backbone moves once for all.

A sketch is what planning needs of a trial: its layout and sizes, without the memory of its weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.modules.meta_build import free_weights
from loadmaster.shards.model.blocks import Chain, build_chain
from loadmaster.shards.model.built_model import BuiltModel
from loadmaster.shards.model.profile import Profile
from loadmaster.shards.plan.layout import Layout
from loadmaster.shards.plan.rates import Rates
from loadmaster.shards.plan.sizes import Sizes
from loadmaster.shards.plan.step_limits import Work, find_step_limit
from loadmaster.shards.spec.engine import TrialPlan
from loadmaster.shards.spec.trial import Trial
from loadmaster.train.backbone.group_plan import GroupPlan, boundary_bytes, group_cuts, plan_group


@dataclass(frozen=True, slots=True, eq=False)
class TrialSketch:
    """A trial as planning sees it."""

    trial: Trial
    chain: Chain
    facts: Profile
    layout: Layout
    sizes: Sizes
    backbone: str  # hash of its frozen parameters


def sketch_trial(
    built: BuiltModel, sizes: Sizes, backbone: str, *, cap_bytes: int, kept: bool
) -> TrialSketch:
    """Cut it as a group would; a model that is not kept for training gives its weights back."""
    from loadmaster.train.backbone.group import build_split_layout

    layout = build_split_layout(built, group_cuts(built, cap_bytes))
    chain = built.chain
    if not kept:
        free_weights(chain.model)
        chain = build_chain(built.trial, chain.model)
    return TrialSketch(built.trial, chain, built.facts, layout, sizes, backbone)


def plan_together(
    plans: Sequence[TrialPlan],
    sketches: Mapping[str, TrialSketch],
    *,
    lent_bytes: Mapping[str, int],
    num_devices: int,
    cap_bytes: int,
    on_gpu: bool,
    rates: Rates,
) -> list[TrialPlan]:
    """The plans, those of trials on one backbone as members of a group; others as they are.

    `lent_bytes`: what a plan leaves out because an earlier trial holds it, which is so within a group alone.
    """
    found = {each.trial: each for each in plans}
    for backbone in dict.fromkeys(each.backbone for each in sketches.values()):
        members = [each for each in sketches.values() if each.backbone == backbone]
        size = -(-len(members) // num_devices)
        for first in range(0, len(members), size):
            part = members[first : first + size]
            while part:
                group = _find_largest_group(part, cap_bytes=cap_bytes, on_gpu=on_gpu)
                if group is None:  # not even one fits: they stream their shards by themselves
                    for each in part:
                        name = each.trial.name
                        found[name] = _add_lent_bytes(found[name], lent_bytes)
                    break
                plan, count = group
                for each in part[:count]:
                    old = found[each.trial.name]
                    own = old if each is not part[0] else _add_lent_bytes(old, lent_bytes)
                    found[old.trial] = _plan_member(own, part[:count], plan, found, rates)
                part = part[count:]
    return [found[each.trial] for each in plans]


def _add_lent_bytes(plan: TrialPlan, lent_bytes: Mapping[str, int]) -> TrialPlan:
    """A plan whose trial holds its backbone itself."""
    return replace(plan, host_bytes=plan.host_bytes + lent_bytes.get(plan.trial, 0))


def _find_largest_group(
    members: Sequence[TrialSketch], *, cap_bytes: int, on_gpu: bool
) -> tuple[GroupPlan, int] | None:
    """As many members as a device takes, from the first on, as groups are filled."""
    for count in range(len(members), 0, -1):
        try:
            return plan_group(members[:count], cap_bytes=cap_bytes, on_gpu=on_gpu), count
        except DeviceMemoryError:
            continue
    return None


def _plan_member(
    old: TrialPlan,
    members: Sequence[TrialSketch],
    plan: GroupPlan,
    found: Mapping[str, TrialPlan],
    rates: Rates,
) -> TrialPlan:
    count = len(members)
    crossing = 0 if plan.on_device else sum(boundary_bytes(each) for each in members)
    up = plan.streamed_bytes + crossing
    flops = sum(found[each.trial.name].detail.plan.work.flops for each in members)
    work = Work(flops=flops, up_bytes=up, down_bytes=crossing, host_stepped=0, host_bytes=up + crossing)
    bound = find_step_limit(work, rates)
    return replace(
        old,
        step_s=bound.predicted_s / count,
        peak_bytes=plan.peak_bytes,
        num_shards=members[0].layout.num_shards,
        bytes_up=up // count,
        bytes_down=crossing // count,
        bound_by=bound.bound_by,
        load_s=0.0,  # who takes turns on one backbone loads nothing for it
        num_together=count,
        is_grouped=True,
    )
