"""Models of other packages, tiny and with random weights, through fdp and on one device."""
