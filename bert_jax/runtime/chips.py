"""What data sheets, and measurements, say of accelerators: the one table of them."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """What XLA's compiler asks of a GPU that is not there, besides its memory."""

    capability: tuple[int, int]  # CUDA's compute capability
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units of a core
    threads: int  # maximum per core
    clock_ghz: float
    cache_bytes: int  # L2
    shared_memory: int  # bytes per core
    block_memory: int  # maximum of it for a block of threads


class Speed(NamedTuple):
    """What kernels were measured to reach in training.

    A kernel takes a factor times the longer of its products at `flops` and its traffic at `bandwidth`.
    """

    flops: float  # of large matrix products in bfloat16, in FLOP/s
    bandwidth: float  # of main memory, in bytes/s
    factors: dict[str, float]  # by kind of kernel
    overhead_seconds: float  # between kernels, per step
    source: str


class Chip(NamedTuple):
    """A kind of accelerator. Rates and sizes are those of a JAX device: half a chip on TPU7x."""

    device_kinds: tuple[str, ...]  # JAX's names of its devices
    flops: float  # dense bfloat16 FLOP/s
    memory_bytes: int  # available to a program
    memory_bandwidth: float  # of main memory, in bytes/s
    # Bytes/s, one way, of a link to a neighboring chip (TPU) or to the node's switch (GPU).
    link_bandwidth: float
    # A device's share of the bytes/s between slices or nodes, one way; 0 if unknown.
    network_bandwidth: float
    source: str  # of these numbers
    example: str  # a topology of such chips
    axes: int = 1  # number of axes of a slice's shape; 1 for GPUs, which are only counted
    devices: int = 1  # JAX devices per chip
    # Measured fraction of the peak in training, with FLOPs by `flops_per_row`, and where it was measured.
    utilization: tuple[float, str] | None = None
    speed: Speed | None = None  # None if its kernels were not measured
    gpu: Gpu | None = None
    clock_hz: float = 0.0  # of the cycles in the estimates of a TPU's compiler
    # gcloud's accelerator type, and the version of the VM's software.
    tpu_vm: tuple[str, str] | None = None
    gke: str = ""  # value of the label `gke-tpu-accelerator` of GKE's nodes
    most_on_vm: int = 4  # number of chips of a slice that has one VM

    @property
    def is_tpu(self) -> bool:
        """Whether this is a TPU, for which libtpu compiles."""
        return self.axes > 1

    @property
    def cores(self) -> int:
        """Cores per chip, which the number in an accelerator type (`v5p-8`) counts."""
        return 2 if self.axes == 3 else 1


GPUS_A_NODE = 8
CHIPS_PER_VM = 4  # of a TPU slice of several VMs
# Maximum length of an axis of a TPU slice with two axes. Such an axis is a ring.
LONGEST_AXIS = 16
# Of chips on which BERT was not measured.
ASSUMED_UTILIZATION = (0.28, "this project, base, T=128, on one H100 (experiments/speed)")

# The rates are in experiments/speed. The factors make the sums of products, attention and other kernels equal
# to those of a traced step, of base with T=128 and cudnn attention; the trace is not kept.
H100_SPEED = Speed(
    flops=748e12,
    bandwidth=2.94e12,
    factors={"products": 1.02, "attention": 2.6, "other": 1.44},
    overhead_seconds=1.4e-3,
    source="one H100 (experiments/speed), and the parts of a step of base traced on it",
)

_GIB = 2**30
_CLOUD = "docs.cloud.google.com/tpu/docs"
# Clocks of TPUs are those at which their matrix units reach `flops`. Numbers of `Gpu` are from NVIDIA's
# data sheets, architecture white papers and the CUDA programming guide (compute capabilities).
# Memory of TPUs is what libtpu's compiler reports as available (0.0.42; 0.0.50 for TPU7x). Link
# bandwidth is the chip's total divided by its number of links, and by 2 if given for both ways.
CHIPS = {
    "v4": Chip(
        ("TPU v4",),
        flops=275e12,
        memory_bytes=int(30.75 * _GIB),
        memory_bandwidth=1200e9,
        link_bandwidth=50e9,
        network_bandwidth=0.0,
        source=f"{_CLOUD}/v4; links: Jouppi et al., arXiv 2304.01964, table 4",
        example="v4:2x2x1",
        axes=3,
        clock_hz=1.05e9,
        tpu_vm=("v4", "tpu-ubuntu2204-base"),
        gke="tpu-v4-podslice",
    ),
    "v5e": Chip(
        ("TPU v5 lite", "TPU v5e"),
        flops=197e12,
        memory_bytes=int(15.75 * _GIB),
        memory_bandwidth=819e9,
        link_bandwidth=50e9,
        network_bandwidth=3.125e9,
        source=f"{_CLOUD}/v5e: 400 GB/s both ways over 4 links; 6.4 Tbit/s a pod of 256 between slices",
        example="v5e:4x4",
        axes=2,
        clock_hz=1.5e9,
        tpu_vm=("v5litepod", "v2-alpha-tpuv5-lite"),
        gke="tpu-v5-lite-podslice",
        most_on_vm=8,
    ),
    "v5p": Chip(
        ("TPU v5", "TPU v5p"),
        flops=459e12,
        memory_bytes=int(95.74 * _GIB),
        memory_bandwidth=2765e9,
        link_bandwidth=100e9,
        network_bandwidth=6.25e9,
        source=f"{_CLOUD}/v5p: 1,200 GB/s both ways over 6 links; 50 Gbit/s between slices",
        example="v5p:4x4x4",
        axes=3,
        clock_hz=1.75e9,
        tpu_vm=("v5p", "v2-alpha-tpuv5"),
        gke="tpu-v5p-slice",
    ),
    "v6e": Chip(
        ("TPU v6 lite", "TPU v6e"),
        flops=918e12,
        memory_bytes=int(31.25 * _GIB),
        memory_bandwidth=1638e9,
        link_bandwidth=100e9,
        network_bandwidth=12.5e9,
        source=f"{_CLOUD}/v6e: 800 GB/s both ways over 4 links; 4 x 200 Gbit/s a host of 8 between slices",
        example="v6e:16x16",
        axes=2,
        clock_hz=1.75e9,
        tpu_vm=("v6e", "v2-alpha-tpuv6e"),
        gke="tpu-v6e-slice",
        most_on_vm=8,
    ),
    "tpu7x": Chip(
        ("TPU7x",),
        flops=2307e12 / 2,
        memory_bytes=int(94.74 * _GIB),
        memory_bandwidth=7380e9 / 2,
        link_bandwidth=50e9,
        network_bandwidth=6.25e9,
        source=f"{_CLOUD}/tpu7x: two devices a chip; a chip has 2,307 TFLOP/s, 7,380 GB/s, 1,200 GB/s "
        "both ways over 6 links, and 100 Gbit/s between slices",
        example="tpu7x:2x2x1",
        axes=3,
        devices=2,
        gke="tpu7x",
    ),
    "a100": Chip(
        ("NVIDIA A100-SXM4-80GB",),
        flops=312e12,
        memory_bytes=80 * 10**9,
        memory_bandwidth=2039e9,
        link_bandwidth=300e9,
        network_bandwidth=25e9,
        source="NVIDIA A100 80GB SXM data sheet; DGX A100: 8 x 200 Gbit/s a node",
        example="a100:64",
        gpu=Gpu((8, 0), 108, 64, 2048, 1.41, 41_943_040, 167_936, 166_912),
        utilization=(0.45, "BERT-large, T=128, on one A100 (NVIDIA DeepLearningExamples)"),
    ),
    "h100": Chip(
        ("NVIDIA H100 80GB HBM3",),
        flops=989e12,
        memory_bytes=80 * 10**9,
        memory_bandwidth=3350e9,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        source="NVIDIA H100 SXM data sheet; DGX H100: 8 x 400 Gbit/s a node",
        example="h100:8",
        gpu=Gpu((9, 0), 132, 128, 2048, 1.98, 52_428_800, 233_472, 232_448),
        speed=H100_SPEED,
        utilization=ASSUMED_UTILIZATION,
    ),
    "h200": Chip(
        ("NVIDIA H200",),
        flops=989e12,
        memory_bytes=141 * 10**9,
        memory_bandwidth=4800e9,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        source="NVIDIA H200 SXM data sheet; DGX H200: 8 x 400 Gbit/s a node",
        example="h200:16",
        gpu=Gpu((9, 0), 132, 128, 2048, 1.98, 62_914_560, 233_472, 232_448),
    ),
    "b200": Chip(
        ("NVIDIA B200",),
        flops=2250e12,
        memory_bytes=180 * 10**9,
        memory_bandwidth=8000e9,
        link_bandwidth=900e9,
        network_bandwidth=50e9,
        source="NVIDIA HGX B200 data sheet, without sparsity; DGX B200: 8 x 400 Gbit/s a node",
        example="b200:8",
        gpu=Gpu((10, 0), 148, 128, 2048, 1.965, 132_120_576, 233_472, 232_448),
    ),
    "l4": Chip(
        ("NVIDIA L4",),
        flops=121e12,
        memory_bytes=24 * 10**9,
        memory_bandwidth=300e9,
        link_bandwidth=32e9,
        network_bandwidth=1.5625e9,
        source="NVIDIA L4 data sheet, without sparsity; PCIe 4.0 x16; g2-standard-96: 8 a node, 100 Gbit/s",
        example="l4:8",
        gpu=Gpu((8, 9), 58, 128, 1536, 2.04, 50_331_648, 102_400, 101_376),
    ),
}


def speed(chip: Chip) -> tuple[Speed, bool]:
    """Return the speed of a chip and whether it was measured; else it is an H100's share of the data sheet."""
    if chip.speed:
        return chip.speed, True
    h100 = CHIPS["h100"]
    scaled = H100_SPEED._replace(
        flops=H100_SPEED.flops / h100.flops * chip.flops,
        bandwidth=H100_SPEED.bandwidth / h100.memory_bandwidth * chip.memory_bandwidth,
    )
    return scaled, False


def find(device_kind: str) -> Chip | None:
    """Return the chip of a JAX device; None if it is not in the table, as any CPU."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)
