#!/usr/bin/env bash
# Lay out radixmlp.* as one import tree of links (.links/), so that mypy and editors resolve it:
# the packages stand at the top of the repository but are imported below `radixmlp`.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .links
mkdir -p .links/radixmlp
for file in radixmlp/*; do
    case "$file" in */__pycache__) ;; *) ln -s "../../$file" ".links/radixmlp/$(basename "$file")" ;; esac
done
for package in reference kernels optimized verify; do
    if [ -d "$package" ]; then ln -s "../../$package" ".links/radixmlp/$package"; fi
done
