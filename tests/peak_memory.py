"""Peak resident memory of the running process alone, for programs that tests start."""

from pathlib import Path


def peak_rss_bytes() -> int:
    """VmHWM of this process, in bytes.

    ``ru_maxrss`` does not serve: it is kept over exec, so a small program started by a large test process reports that.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmHWM line; these tests need Linux")
