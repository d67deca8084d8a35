"""Run a command on clusters and clouds.

`request` checks what is asked for, `engines` turns it into a `Plan`, `plan` executes it, and `jobs`
remembers it by name. The scripts and the Dockerfile are in `launch/`.
"""
