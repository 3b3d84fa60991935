import { type RdmaDevice, rdmaDevices } from "../../backends/rdma-devices.js";
import type { Host } from "../../host.js";
import { nvidiaGpus } from "../../memory/memory-types.js";
import type { Check } from "../../reports.js";
import { finding } from "./finding.js";

const DEFAULT_DOCKER_SHM_BYTES = 64 << 20;
const CAP_SYS_PTRACE = 19n;

export function machineChecks(host: Host, backends: readonly string[]): Check[] {
  if (host.platform !== "linux") return [];
  const devices = rdmaDevices(host);
  return [
    memlock(host, devices),
    descriptors(host),
    ptrace(host),
    sharedMemory(host),
    ...rdma(host, devices, backends),
    gpu(host),
  ];
}

/** Undefined when it cannot be read. */
const limitOf = (host: Host, name: string): string | undefined =>
  new RegExp(`^Max ${name}\\s+(\\S+)`, "m").exec(host.text("/proc/self/limits") ?? "")?.[1];

function memlock(host: Host, devices: readonly RdmaDevice[]): Check {
  const check = finding("machine", "memlock", "locked memory");
  const limit = limitOf(host, "locked memory");
  if (limit === undefined) return check("note", "the limit cannot be read");
  const details = { limitBytes: limit === "unlimited" ? null : Number(limit) };
  if (limit === "unlimited") return check("ok", "unlimited", { details });
  const found = `${Math.round(Number(limit) / 1024)} KiB`;
  if (devices.length === 0)
    return check("note", `${found}; without an RDMA device nothing is locked`, { details });
  return check(
    "warn",
    `${found}: RDMA locks all registered memory, and registration fails beyond the limit`,
    {
      fix: "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd; docker run --ulimit memlock=-1)",
      details,
    },
  );
}

/**
 * An agent needs 40 free file descriptors, a peer one to four: below this a few peers are too many.
 */
const FEW_DESCRIPTORS = 512;

function descriptors(host: Host): Check {
  const check = finding("machine", "descriptors", "file descriptors");
  const limit = limitOf(host, "open files");
  if (limit === undefined) return check("note", "the limit cannot be read");
  const details = { limit: limit === "unlimited" ? null : Number(limit) };
  if (limit === "unlimited" || Number(limit) >= FEW_DESCRIPTORS)
    return check("ok", limit, { details });
  return check("warn", `${limit}: an agent needs 40, and each peer up to 4`, {
    fix: "ulimit -n 4096 (LimitNOFILE=4096 in systemd; docker run --ulimit nofile=4096)",
    details,
  });
}

function ptrace(host: Host): Check {
  const check = finding("machine", "ptrace", "ptrace scope (CMA)");
  const allowed = "processes of one user may read each other's memory";
  const text = host.text("/proc/sys/kernel/yama/ptrace_scope");
  if (text === undefined) return check("ok", `no Yama: ${allowed}`);
  const scope = Number(text);
  const capabilities =
    /^CapEff:\s*([0-9a-f]+)/m.exec(host.text("/proc/self/status") ?? "")?.[1] ?? "0";
  const capable = ((BigInt(`0x${capabilities}`) >> CAP_SYS_PTRACE) & 1n) === 1n;
  const details = { scope, capable };
  if (scope === 0) return check("ok", `0: ${allowed}`, { details });
  if (capable && scope < 3)
    return check("ok", `${scope}, and this process has CAP_SYS_PTRACE`, { details });
  return check(
    "warn",
    `${scope}: processes on this host cannot copy from each other (CMA); UCX uses a slower transport`,
    {
      fix: "sysctl -w kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE (docker run --cap-add=SYS_PTRACE)",
      details,
    },
  );
}

function sharedMemory(host: Host): Check {
  const check = finding("machine", "shm", "shared memory");
  const space = host.space("/dev/shm");
  if (space === undefined) {
    return check("warn", "there is no /dev/shm: UCX cannot use shared memory between processes", {
      fix: "mount -t tmpfs tmpfs /dev/shm",
    });
  }
  const mib = (bytes: number) => `${Math.round(bytes / 2 ** 20)} MiB`;
  const found = `/dev/shm has ${mib(space.freeBytes)} free of ${mib(space.totalBytes)}`;
  const details = { ...space };
  if (!host.writable("/dev/shm")) {
    return check("warn", "/dev/shm cannot be written, and UCX does not start", {
      fix: "mount -o remount,rw /dev/shm, or UCX_TLS=^posix on both sides",
      details,
    });
  }
  if (space.freeBytes > DEFAULT_DOCKER_SHM_BYTES) return check("ok", found, { details });
  return check("warn", `${found}: too little for several agents`, {
    fix: "enlarge it: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm",
    details,
  });
}

function rdma(host: Host, devices: readonly RdmaDevice[], backends: readonly string[]): Check[] {
  if (devices.length === 0) {
    const check = finding("machine", "rdma", "RDMA and EFA devices");
    const details = { devices: [] };
    return [check("note", "none: transfers to other hosts use TCP", { details })];
  }
  const verbs = host.names("/dev/infiniband").filter((name) => /^uverbs/.test(name));
  const reachable = verbs.some((name) => host.writable(`/dev/infiniband/${name}`));
  const checks = devices.map((device): Check => {
    const { name, efa, link, ports } = device;
    const check = finding("machine", `rdma.${name}`, efa ? "EFA device" : "RDMA device");
    const details = { ...device };
    const found = `${name}, ${link}, ports ${ports.join("; ") || "none"}`;
    if (!reachable) {
      return check("warn", `${found}; /dev/infiniband/uverbs* cannot be opened here`, {
        fix: "give the container access to the devices: docker run --device=/dev/infiniband",
        details,
      });
    }
    if (ports.some((state) => state.includes("ACTIVE"))) return check("ok", found, { details });
    const fix = `see: rdma link show ${name}`;
    return check("warn", `${found}: no port is active`, { fix, details });
  });
  if (devices.every(({ efa }) => efa) && !backends.includes("LIBFABRIC")) {
    const found = `the devices are EFA, and the backend is ${backends.join(",")}: READ and WRITE would not use EFA`;
    const fix = "NIXL_BACKEND=LIBFABRIC on both sides";
    checks.push(finding("machine", "efa", "EFA with UCX")("warn", found, { fix }));
  }
  return checks;
}

function gpu(host: Host): Check {
  const nvidia = nvidiaGpus(host.names);
  const neuron = host.names("/dev").filter((name) => /^neuron\d+$/.test(name));
  const found = [
    nvidia.length > 0 ? `${nvidia.length} NVIDIA` : "",
    neuron.length > 0 ? `${neuron.length} Neuron` : "",
  ].filter((text) => text !== "");
  return finding("machine", "accelerators", "accelerators")(
    "note",
    found.length > 0 ? found.join(", ") : "none: KV caches are in DRAM",
    { details: { nvidia, neuron } },
  );
}
