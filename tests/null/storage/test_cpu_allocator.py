"""The allocator of CPU memory under a plan: when it is installed, and that nothing but memory can tell."""

import os
import subprocess
import sys
import textwrap

import pytest

GLIBC = "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not GLIBC, reason="glibc's heap")]

_OTHERS = """
    import ctypes, os
    import torch

    c10 = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    of_c10 = c10._ZN3c1015GetCPUAllocatorEv
    another = c10._ZN3c1028GetDefaultMobileCPUAllocatorEv
    of_c10.restype = another.restype = ctypes.c_void_p
    replace = c10._ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh
    replace.argtypes = [ctypes.c_void_p, ctypes.c_uint8]
"""

_STEP = """
    import torch
    import zero_compiler as zero
    from zero_compiler.runtime import _C

    model = zero.shard(torch.nn.Linear(8, 8))
    assert not _C.cpu_allocator_is_installed()
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    step(torch.ones(2, 8)).sum().backward()
"""


def run(*parts: str, **env: str) -> str:
    """What a program prints, in a process of its own: the allocator is one for all of it."""
    command = [sys.executable, "-c", "".join(map(textwrap.dedent, parts))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("metered", [False, True])
def test_the_first_plan_on_the_cpu_installs_it(metered):
    meter = """
        from zero_compiler.runtime import _C
        _C.meter_install()
    """
    assert run(meter if metered else "", _STEP, "print(_C.cpu_allocator_is_installed())\n") == "True"


def test_another_allocator_stays():
    ask = """
        print(_C.cpu_allocator_is_installed(), of_c10() == another())
    """
    assert run(_OTHERS, "replace(another(), 0)\n", _STEP, ask) == "False True"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("THP_MEM_ALLOC_ENABLE", "1"),
        ("MALLOC_TRIM_THRESHOLD_", "1000000"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1000000"),
    ],
)
def test_what_the_user_has_set_stays(name, value):
    assert run(_STEP, "print(_C.cpu_allocator_is_installed())\n", **{name: value}) == "False"


def test_it_is_not_installed_where_another_library_allocates(tmp_path):
    """As jemalloc does: malloc() is not glibc's, whatever else of glibc is there."""
    source = """
        #include <errno.h>
        #include <stddef.h>
        #include <string.h>
        #include <sys/mman.h>
        static char *next, *end;
        static char busy;
        static void *take(size_t alignment, size_t n) {
          while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {}
          char *at = (char *)(((size_t)next + 16 + alignment - 1) & ~(alignment - 1));
          if (!next || at + n > end) {
            size_t size = n + alignment + (64 << 20);
            next = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            end = next + size;
            at = (char *)(((size_t)next + 16 + alignment - 1) & ~(alignment - 1));
          }
          *(size_t *)(at - 16) = n;
          next = at + n;
          __atomic_clear(&busy, __ATOMIC_RELEASE);
          return at;
        }
        void *malloc(size_t n) { return take(16, n); }
        void free(void *p) { (void)p; }
        void *calloc(size_t n, size_t of) { return take(16, n * of); }
        void *realloc(void *p, size_t n) {
          void *q = take(16, n);
          size_t had = p ? *(size_t *)((char *)p - 16) : 0;
          return p ? memcpy(q, p, had < n ? had : n) : q;
        }
        int posix_memalign(void **p, size_t a, size_t n) { *p = take(a < 16 ? 16 : a, n); return 0; }
        void *aligned_alloc(size_t a, size_t n) { return take(a < 16 ? 16 : a, n); }
        void *memalign(size_t a, size_t n) { return take(a < 16 ? 16 : a, n); }
        size_t malloc_usable_size(void *p) { return p ? *(size_t *)((char *)p - 16) : 0; }
    """
    (tmp_path / "other.c").write_text(textwrap.dedent(source))
    library = tmp_path / "other.so"
    build = ["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", str(tmp_path / "other.c"), "-o", str(library)]
    try:
        subprocess.run(build, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    ask = """
        import torch
        from zero_compiler.runtime import _C

        print(_C.install_cpu_allocator(), torch.ones(1000).sum().item())
    """
    assert run(ask, LD_PRELOAD=str(library)) == "False 1000.0"


_OBSERVED = """
    import os, pickle
    import numpy as np
    import torch
    from torch.utils.data import DataLoader
    from zero_compiler.runtime import _C

    def said(call):
        try:
            return repr(call())
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def in_child(call):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if call() else 1)
        return os.waitpid(pid, 0)[1]

    def freed_and_made():
        held.clear()
        return torch.ones(1 << 16).sum().item() == 1 << 16

    def observed():
        found = {}
        for nbytes in (1 << 60, (1 << 63) - 1):
            found[f"empty of {nbytes}"] = said(lambda: torch.empty(nbytes, dtype=torch.uint8))
        found["nothing"] = torch.empty(0).data_ptr()
        found["alignment"] = {torch.empty(n, dtype=torch.uint8).data_ptr() % 64 for n in range(1, 3000, 7)}

        with torch.profiler.profile(profile_memory=True) as profile:
            for _ in range(3):
                torch.empty(1 << 20, dtype=torch.uint8)
        events = {e.key: (e.count, e.cpu_memory_usage, e.self_cpu_memory_usage) for e in profile.key_averages()}
        found["profiled"] = events["aten::empty"], events.get("[memory]")

        grown = torch.arange(10)
        grown.untyped_storage().resize_(1 << 16)
        found["storage"] = grown.tolist(), grown.untyped_storage().nbytes(), grown.untyped_storage().resizable()
        grown.untyped_storage().resize_(0)
        grown = torch.arange(10).resize_(5000)
        found["resized"] = grown[:10].tolist()

        array = np.arange(12.0)
        tensor = torch.from_numpy(array)
        tensor += 1
        found["numpy"] = array.tolist(), tensor.data_ptr() == array.ctypes.data, torch.arange(3).numpy().tolist()

        found["pinned"] = said(lambda: torch.empty(10, pin_memory=True).is_pinned())
        found["pin"] = said(lambda: torch.ones(10).pin_memory().is_pinned()), torch.ones(3).is_pinned()
        found["shared"] = torch.ones(1000).share_memory_().is_shared(), torch.ones(3).is_shared()
        found["pickled"] = pickle.loads(pickle.dumps(torch.arange(100))).sum().item()
        loader = DataLoader(torch.arange(64.0).view(32, 2), batch_size=8, num_workers=2)
        found["loaded"] = [(batch.sum().item(), batch.is_shared()) for batch in loader]
        found["forked"] = in_child(freed_and_made)
        return found

    torch.set_num_threads(1)  # a child of threads of OpenMP waits for them
    held = [torch.ones(n) for n in (1, 100, 1 << 14, 1 << 21)]
    before = observed()
    assert not _C.cpu_allocator_is_installed()
    assert _C.install_cpu_allocator() and _C.cpu_allocator_is_installed()
    assert _C.install_cpu_allocator()
    held += [torch.ones(n) for n in (1, 100, 1 << 14, 1 << 21)]
    after = observed()
    held.clear()  # of before and of after
    for name in before:
        print(name, before[name], sep=": ")
        assert before[name] == after[name], (name, before[name], after[name])
    assert before["profiled"][0] == (3, 3 << 20, 3 << 20), before["profiled"]
    assert before["forked"] == 0
"""


def test_nobody_but_memory_can_tell():
    said = run(_OBSERVED)
    assert "tried to allocate 1152921504606846976 bytes" in said


_ROOMS = """
    import ctypes
    import torch
    from zero_compiler.runtime import _C

    assert _C.install_cpu_allocator()
    libc = ctypes.CDLL(None)
    torch.ones(16 << 20, dtype=torch.uint8)  # blocks of less come out of the heap from here on
    places = set()
    for _ in range(40):
        large = torch.ones(4 << 20, dtype=torch.uint8)
        places.add(large.data_ptr())
        for size in range(24, 136, 16):
            for _ in range(16):
                libc.malloc(size)  # small, and it stays
        del large
    print(len(places))
"""


def test_a_tensor_takes_the_room_that_one_of_its_size_has_left():
    assert int(run(_ROOMS)) <= 3  # 40 with torch's own
