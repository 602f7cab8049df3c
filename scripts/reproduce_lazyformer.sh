#!/usr/bin/env bash
# Runs `lazyformer reproduce` from a checkout.
exec bash "$(dirname "$0")/lazyformer.sh" reproduce "$@"
