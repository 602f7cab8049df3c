"""Random orders of equal sublayers or equal parameters, beside Sandwich's (Press et al., 2019, section 3)."""
