"""Estimate memory, time and cost of a pretraining run without the hardware.

For TPUs, libtpu compiles the training step ahead of time on any x86 machine, and the report is read
from the compiled program. For GPUs, whose compiler needs the GPU's libraries, and where a program
does not fit, formulas replace it, and the report says so.

Two times are reported. The roofline is a lower bound: what the data sheet allows when compute, memory
and network overlap perfectly. The expected time assumes a share of the peak that was measured
(`runtime/chips.py`).
"""
