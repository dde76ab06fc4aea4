"""Starts a small Ray cluster on this machine; runs ``train_ray.py`` for each list of arguments.

``python ray_session.py FOLDER_OF_RAY ARGUMENTS [-- ARGUMENTS ...]``
"""

from __future__ import annotations

import sys
from itertools import groupby

import ray

import train_ray

if __name__ == "__main__":
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=sys.argv[1]
    )
    try:
        for is_mark, arguments in groupby(sys.argv[2:], key=lambda each: each == "--"):
            if not is_mark:
                train_ray.main(list(arguments))
    finally:
        ray.shutdown()
