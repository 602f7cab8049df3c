#!/usr/bin/env bash
# `lazyformer continue`, from a checkout
exec bash "$(dirname "$0")/lazyformer.sh" continue "$@"
