"""Host memory that programs may still take, and how much of it may be pinned."""

from pathlib import Path


def free_host_bytes() -> int:
    """Memory that programs may still take: of the machine, and of the container this one is in."""
    found = 2**62  # not said here: the operating system will
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
    except OSError:
        pass
    return min(found, _free_of_container_bytes(Path("/sys/fs/cgroup")))


def _free_of_container_bytes(folder: Path) -> int:
    """What a limit on this control group leaves, files that are only cached not counted."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = (folder / limit).read_text(encoding="ascii").strip()
            now = int((folder / used).read_text(encoding="ascii"))
            stat = (folder / limit).with_name("memory.stat").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            continue
        if most == "max":
            return 2**62
        kept = dict(zip(stat[::2], stat[1::2], strict=False))
        cached = sum(int(kept.get(name, 0)) for name in ("active_file", "inactive_file"))
        return max(0, int(most) - now + cached)
    return 2**62


def lockable_bytes() -> int | None:
    """How much memory may be pinned; None: no limit."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit
