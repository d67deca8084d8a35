"""Run a command on clusters and clouds.

`request` checks what is asked for, a module of `engines` turns it into a `Plan`, `plan` executes it, and
`jobs` remembers it by name. The machines run `scripts/`.
"""
