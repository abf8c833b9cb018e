"""The shell: parse, call one function, print."""
