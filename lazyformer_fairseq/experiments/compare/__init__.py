"""``lazyformer compare``: train models side by side under the same conditions and compare their losses and costs."""
