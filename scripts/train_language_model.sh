#!/usr/bin/env bash
# `lazyformer lm train`, from a checkout
exec bash "$(dirname "$0")/lazyformer.sh" lm train "$@"
