"""Tools of this repository that no user runs: they fetch binaries for the tests, and build files that are shipped."""
