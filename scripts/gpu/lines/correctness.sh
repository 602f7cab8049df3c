# shellcheck shell=bash disable=SC2154
# Runs all tests that need a GPU, eight at a time. conftest.py is skipped, because it requires all dependencies of the
# corpus builder. If the time runs out, SIGINT makes pytest print the failures so far.
tests=(tests/modules/attention/test_on_gpu.py tests/modules/networks/test_updates_on_gpu.py
  tests/modules/sublayers/test_convolution.py tests/modules/sublayers/test_recurrent.py)
side_by_side=()
if [[ -z $tiny ]] && "$python" -c 'import xdist' 2>/dev/null; then side_by_side=(-n 8); fi
cd "$root"
CUBLAS_WORKSPACE_CONFIG=:4096:8 part 300 tests "$python" -m pytest -q --noconftest -p no:cacheprovider \
  --override-ini "addopts=--import-mode=importlib" -k "on_gpu or on_a_gpu" --junit-xml "$work/tests.xml" \
  "${side_by_side[@]}" "${tests[@]}"
