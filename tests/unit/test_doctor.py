"""What doctor finds on hosts of several kinds, healthy and broken. The trees are made, not recorded."""

import gzip

import pytest

from sky_monarch.doctor import Severity, Situation, Wanted, examine
from sky_monarch.doctor.kernel import direct_path
from sky_monarch.doctor.limits import UNLIMITED, Limits
from sky_monarch.doctor.tree import Tree
from tests.support.gpu_hosts import GIB, NODES, GpuHost, report

ENOUGH = Limits(
    locked_bytes=UNLIMITED,
    open_files=1 << 20,
    shm_bytes=64 * GIB,
    shm_free_bytes=60 * GIB,
    hostname="h1",
    resolves=True,
)


def look(host, **changes):
    return examine(
        Situation(
            **{
                "root": host.root,
                "limits": ENOUGH,
                "report": report(host.devices),
                "torch_hip": "7.1.25424",
                "wanted": Wanted(devices=host.devices, exactly=True),
                **changes,
            }
        )
    )


def bad(found):
    return {
        (one.check, one.severity.value)
        for one in found.findings
        if one.severity in (Severity.ERROR, Severity.WARNING)
    }


def only(found, check):
    (one,) = [one for one in found.findings if one.check == check and one.severity is not Severity.OK]
    return one


@pytest.mark.parametrize(
    ("model", "arch", "devices"),
    [("MI250", "gfx90a", 8), ("MI300X", "gfx942", 8), ("MI325X", "gfx942", 8), ("MI355X", "gfx950", 8)],
)
def test_a_healthy_host_of_each_model_has_neither_errors_nor_warnings(tmp_path, model, arch, devices):
    found = look(GpuHost(tmp_path, model=model, cards=4 if model == "MI250" else 8))
    assert bad(found) == set()
    assert [one.model for one in found.devices] == [model] * devices
    assert {one.arch for one in found.devices} == {arch}
    assert found.devices[1].pci == ("0000:06:00.0" if model == "MI250" else "0000:15:00.0")
    assert len({one.uuid for one in found.devices}) == devices


def test_a_host_without_accelerators_says_so_and_is_healthy(tmp_path):
    empty = report(0, platform="host", libraries=[])
    found = examine(Situation(root=tmp_path, limits=ENOUGH, report=empty))
    assert found.healthy
    assert only(found, "gpu.count").message == "no accelerators"
    assert found.to_json()["accelerators"] == []


def test_a_partitioned_host_is_counted_by_devices_and_warned_of(tmp_path):
    found = look(GpuHost(tmp_path, cards=2, compute="CPX"))
    assert bad(found) == {("gpu.partition", "warning")}
    assert len(found.devices) == 16
    assert len({one.pci for one in found.devices}) == 2
    assert "each of 2 card(s) shows as 8 devices" in only(found, "gpu.partition").message


def test_cards_that_are_partitioned_differently_are_an_error(tmp_path):
    host = GpuHost(tmp_path)
    host.write(f"{host.sysfs(3)}/current_compute_partition", "CPX")
    host.write(f"{host.sysfs(3)}/current_memory_partition", "NPS4")
    assert bad(look(host)) == {("gpu.partition", "error"), ("gpu.memory_partition", "warning")}


def spoil(path, text):
    return lambda host: host.write(path.format(sysfs=host.sysfs(2), release=host.release), text)


def other_index(host):
    host.write("sys/class/infiniband/mlx5_3/ports/1/gid_attrs/types/3", "IB/RoCE v1")
    host.nic("mlx5_3", 0x15B3, index=5)


@pytest.mark.parametrize(
    ("break_it", "check", "severity", "said"),
    [
        (spoil("proc/cmdline", "ro quiet"), "kernel.iommu", "warning", "iommu=pt is not on the kernel's command line"),
        (spoil("proc/sys/kernel/numa_balancing", "1"), "kernel.numa_balancing", "warning", "NUMA balancing is on"),
        (lambda host: host.bridge(control=0x1D), "kernel.acs", "warning", "such as 0000:00:01.0"),
        (
            spoil("boot/config-{release}", "# CONFIG_PCI_P2PDMA is not set\n"),
            "kernel.gpudirect",
            "warning",
            "staged through the host",
        ),
        (spoil("{sysfs}/ras/umc_err_count", "ue: 3\nce: 9"), "gpu.memory_errors", "error", "device 2 (MI300X at 0000"),
        (spoil("{sysfs}/ras/gpu_vram_bad_pages", "0x1 : R\n0x2 : R"), "gpu.bad_pages", "warning", "2 page"),
        (spoil("{sysfs}/mem_info_vram_used", str(40 * GIB)), "gpu.leaked_memory", "warning", "40.0 GiB in use"),
        (spoil("{sysfs}/mem_info_vis_vram_total", str(GIB // 4)), "gpu.large_bar", "warning", "256 of 196608 MiB"),
        (spoil(f"{NODES}/4/io_links/0/properties", "type 2\nnode_to 2"), "gpu.links", "warning", "1 pair(s)"),
        (spoil("sys/class/infiniband/mlx5_3/ports/1/state", "1: DOWN"), "network.link", "warning", "mlx5_3"),
        (spoil("sys/class/infiniband/mlx5_3/ports/1/rate", "100 Gb/sec"), "network.rate", "warning", "100, 400"),
        (spoil("sys/class/infiniband/mlx5_3/device/net/rdmamlx5_3/mtu", "1500"), "network.mtu", "warning", "(1500)"),
        (other_index, "network.gid", "warning", "[3, 5]"),
        (
            spoil("sys/class/infiniband/mlx5_3/ports/1/gid_attrs/types/3", "IB/RoCE v1"),
            "network.gid",
            "warning",
            "no RoCE v2 address over IPv4 on mlx5_3",
        ),
    ],
)  # fmt: skip
def test_each_fault_of_a_host_is_found_alone_with_what_helps(tmp_path, break_it, check, severity, said):
    host = GpuHost(tmp_path)
    break_it(host)
    found = look(host)
    assert bad(found) == {(check, severity)}
    one = only(found, check)
    assert said in one.message
    assert one.fix


def test_leaked_memory_is_not_said_of_a_host_that_is_at_work(tmp_path):
    host = GpuHost(tmp_path)
    host.write(f"{host.sysfs(0)}/mem_info_vram_used", str(100 * GIB))
    host.write("sys/class/kfd/kfd/proc/4711/pasid", "1")
    assert bad(look(host)) == set()


def test_nics_of_two_vendors_and_no_iommu_passthrough_are_each_said_with_their_fix(tmp_path):
    nics = {
        **{f"mlx5_{index}": 0x15B3 for index in range(2)},
        **{f"bnxt_re{index}": 0x14E4 for index in range(6)},
    }
    host = GpuHost(tmp_path, nics=nics)
    host.write("proc/cmdline", "ro")
    found = look(host)
    assert bad(found) == {("network.mixed", "warning"), ("kernel.iommu", "warning")}
    assert "NCCL_IB_HCA=bnxt_re0,bnxt_re1" in only(found, "network.mixed").fix
    assert "update-grub" in only(found, "kernel.iommu").fix
    assert found.healthy, "both are warnings"


def test_cards_on_the_bus_without_a_driver_are_an_error_not_an_empty_host(tmp_path):
    host = GpuHost(tmp_path)
    for node in range(2, 6):
        (tmp_path / NODES / str(node) / "properties").unlink()
    found = look(host, wanted=None)
    assert not found.healthy
    assert "4 AMD device(s) on the PCI bus" in only(found, "gpu.driver").message


def test_a_card_that_fell_off_the_bus_is_missed_where_it_is_expected(tmp_path):
    found = look(GpuHost(tmp_path, cards=3), wanted=Wanted(devices=4, exactly=True))
    assert bad(found) == {("gpu.count", "error")}
    assert (
        only(found, "gpu.count").message == "too few accelerators: 3 x MI300X; expected: 4 x any accelerator"
    )


@pytest.mark.parametrize(
    ("env", "check", "severity", "said"),
    [
        (
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"},
            "env.masks",
            "error",
            "counted from 0",
        ),
        (
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"},
            "env.masks",
            "warning",
            "device(s) [3]",
        ),
        (
            {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"},
            "env.masks",
            "error",
            "name different devices",
        ),
        ({"HIP_VISIBLE_DEVICES": ""}, "env.masks", "error", "leaves no device of 4"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "env.masks", "warning", "an alias"),
        ({"NCCL_ALGO": "Ring"}, "env.rccl_pinned", "warning", "NCCL_ALGO=Ring"),
        ({"HSA_OVERRIDE_GFX_VERSION": "9.4.2"}, "env.gfx_override", "warning", "kernels of another device"),
        (
            {"NCCL_SOCKET_IFNAME": "ib0"},
            "env.socket_interface",
            "error",
            "names no interface of this host (eth0)",
        ),
        ({"NCCL_IB_HCA": "mlx5_0:1,bnxt_re0"}, "env.rdma_nic", "error", "has no bnxt_re0"),
        ({"NCCL_IB_GID_INDEX": "1"}, "env.gid_index", "error", "at [3]"),
    ],
)
def test_variables_that_do_harm_are_found(tmp_path, env, check, severity, said):
    found = look(GpuHost(tmp_path), env=env)
    assert bad(found) == {(check, severity)}
    assert said in only(found, check).message


def test_variables_that_fit_the_host_are_not(tmp_path):
    env = {
        "HIP_VISIBLE_DEVICES": "2,3", "NCCL_SOCKET_IFNAME": "eth", "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "NCCL_IB_GID_INDEX": "3",
    }  # fmt: skip
    assert bad(look(GpuHost(tmp_path), env=env)) == set()


def test_what_rccls_own_file_says_counts_unless_the_environment_says_otherwise(tmp_path):
    host = GpuHost(tmp_path)
    host.write(
        "etc/rccl.conf", "# tuned long ago\nNCCL_PROTO=LL128\nNCCL_IB_GID_INDEX = 1 # was right once\n"
    )
    assert bad(look(host)) == {("env.rccl_pinned", "warning"), ("env.gid_index", "error")}
    assert bad(look(host, env={"NCCL_IB_GID_INDEX": "3"})) == {("env.rccl_pinned", "warning")}


@pytest.mark.parametrize(
    ("changes", "check", "severity"),
    [
        ({"locked_bytes": 64 << 10}, "network.locked_memory", "error"),
        ({"open_files": 1024}, "host.open_files", "warning"),
        ({"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "host.shm", "error"),
        ({"shm_free_bytes": 5 << 20}, "host.shm", "warning"),
        ({"shm_bytes": None, "shm_free_bytes": None}, "host.shm", "error"),
        ({"resolves": False}, "host.name", "warning"),
        ({"resolves": None}, "host.name", "warning"),
    ],
)
def test_limits_that_are_too_small_are_found(tmp_path, changes, check, severity):
    from dataclasses import replace

    assert bad(look(GpuHost(tmp_path), limits=replace(ENOUGH, **changes))) == {(check, severity)}


@pytest.mark.parametrize(
    ("spoil_report", "check", "severity", "said"),
    [
        (lambda r: r["libraries"][0]["copies"].append("/x/libamdhip64.so"), "library.hip", "error", "2 copies of"),
        (lambda r: r["libraries"][1].update(version="2.20.5"), "library.rccl", "warning", "GPUDirect off"),
        (lambda r: r["libraries"][1].update(version="2.30.4"), "library.rccl", "warning", "a rank is missing"),
        (lambda r: r["libraries"][1].update(error="no RCCL library"), "library.rccl", "error", "no RCCL library"),
        (lambda r: r["devices"][3].update(error="hipMalloc: 999"), "gpu.smoke", "error", "device 3"),
        (lambda r: r["devices"][3].update(works=False), "gpu.smoke", "error", "gives back other bytes"),
        (lambda r: r["devices"].pop(), "gpu.count", "error", "HIP sees 3 device(s) and the kernel 4"),
        (lambda r: r.update(simulated=True), "gpu.simulated", "warning", "SIMULATED"),
        (lambda r: r.update(failed="was not done after 60 s"), "gpu.smoke", "error", "was not done after 60 s"),
        (lambda r: r.update(error="hipGetDeviceCount returned 35"), "gpu.runtime", "error", "returned 35"),
    ],
)  # fmt: skip
def test_what_libraries_and_devices_say_is_judged(tmp_path, spoil_report, check, severity, said):
    told = report()
    spoil_report(told)
    found = look(GpuHost(tmp_path), report=told)
    assert bad(found) == {(check, severity)}
    assert said in only(found, check).message


def test_a_torch_for_cuda_on_an_amd_host_is_an_error(tmp_path):
    assert bad(look(GpuHost(tmp_path), torch_hip="")) == {("torch.build", "error")}
    assert bad(look(GpuHost(tmp_path), torch_hip=None)) == set(), "no torch is no fault of the host"


def test_the_way_to_a_devices_memory_is_read_from_wherever_the_kernel_says_it(tmp_path):
    def path(folder, **files):
        host = GpuHost(tmp_path / folder)
        (host.root / f"boot/config-{host.release}").unlink()
        for name, text in files.items():
            host.write(name.replace("__", "/").replace("_gz", ".gz"), text)
        return direct_path(Tree(host.root))

    both = "CONFIG_PCI_P2PDMA=y\nCONFIG_DMABUF_MOVE_NOTIFY=y\n"
    peer = "ffffffff81000000 T ib_register_peer_memory_client\t[ib_core]\n"
    assert path("none") == "unknown"
    assert path("gz", proc__config_gz=gzip.compress(both.encode())) == "dmabuf"
    assert path("half", proc__config_gz=gzip.compress(b"CONFIG_PCI_P2PDMA=y\n")) == "staging"
    assert path("symbols", proc__kallsyms=peer) == "peermem"
    assert path("old", sys__kernel__mm__memory_peers__amdkfd__version="1") == "peermem"
    assert path("damaged", proc__config_gz=b"not gzip") == "unknown"


def test_a_tree_of_rubbish_gives_findings_and_no_traceback(tmp_path):
    host = GpuHost(tmp_path)
    for file in sorted(host.root.rglob("*")):
        if file.is_file() and "kfd/topology" not in str(file):
            file.write_bytes(b"\xff\xfe\x00 rubbish 9999999999999999999999\n" * 3)
    found = look(host)
    assert found.devices
    assert all(one.check != "doctor" for one in found.findings), found.findings


def test_faults_in_the_kernels_log_are_found_and_other_lines_are_not(tmp_path):
    quiet = "[1.0] amdgpu 0000:05:00.0: amdgpu: SMU is initialized!\n[2.0] nvme nvme0: resetting\n"
    loud = quiet + "[9.1] amdgpu 0000:25:00.0: amdgpu: GPU reset begin!\n"
    assert bad(look(GpuHost(tmp_path), tools={"dmesg": quiet})) == set()
    found = look(GpuHost(tmp_path), tools={"dmesg": loud})
    assert bad(found) == {("gpu.kernel_log", "warning")}
    assert "0000:25:00.0" in only(found, "gpu.kernel_log").message
