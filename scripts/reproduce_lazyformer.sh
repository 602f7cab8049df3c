#!/usr/bin/env bash
# `lazyformer reproduce`, from a checkout
exec bash "$(dirname "$0")/lazyformer.sh" reproduce "$@"
