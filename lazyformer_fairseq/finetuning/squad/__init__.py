"""lazyformer squad: prepare, run, report, predict."""
