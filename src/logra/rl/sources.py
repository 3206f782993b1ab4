"""Rows of a data set from wherever it lies: a file, a saved folder, the Hugging Face hub, or a reasoning-gym generator.

Rows stay in the form they came in (raw JSON lines, an Arrow table, a memory-mapped data set) and become Python objects
one at a time. The heavy packages are imported by the loader that needs them.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logra.errors import DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow

Row = dict[str, Any]
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
