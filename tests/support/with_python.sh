#!/bin/sh
# with_python.sh <script> <argument>...: runs the script with the first Python that can import torch and safetensors; exit
# code 77, which ctest shows as skipped, when there is none.
for python in ${ATTN_PYTHON:+"$ATTN_PYTHON"} python3 \
    "${XDG_CACHE_HOME:-$HOME/.cache}"/attn/torch-*/bin/python; do
  if "$python" -c 'import torch, safetensors.torch' 2>/dev/null; then
    exec "$python" "$@"
  fi
done
echo "skipped: no Python that can import torch and safetensors (cmake/bootstrap.sh --python installs one," \
  "ATTN_PYTHON names one)"
exit 77
