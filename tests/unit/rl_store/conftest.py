import resource
from contextlib import contextmanager

import pytest


@pytest.fixture
def file_limit():
    """`with file_limit(n)`: the kernel lets no file grow past n bytes, as if the disk were full."""

    @contextmanager
    def limit(num_bytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit
