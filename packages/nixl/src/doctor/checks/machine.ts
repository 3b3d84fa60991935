import { isEfaOnly, type RdmaDevice, rdmaDevices } from "../../backends/rdma-devices.js";
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

/** Null for "unlimited"; undefined when it cannot be read. */
function limitOf(host: Host, name: string): number | null | undefined {
  const limits = host.text("/proc/self/limits") ?? "";
  const text = new RegExp(`^Max ${name}\\s+(\\S+)`, "m").exec(limits)?.[1];
  if (text === "unlimited") return null;
  return text === undefined ? undefined : Number(text);
}

function memlock(host: Host, devices: readonly RdmaDevice[]): Check {
  const limitBytes = limitOf(host, "locked memory");
  const check = finding("machine", "memlock", "locked memory", { limitBytes });
  if (limitBytes === undefined) return check("note", "the limit cannot be read");
  if (limitBytes === null) return check("ok", "unlimited");
  const found = `${Math.round(limitBytes / 1024)} KiB`;
  if (devices.length === 0)
    return check("note", `${found}; without an RDMA device nothing is locked`);
  return check(
    "warn",
    `${found}: RDMA locks all registered memory, and registration fails beyond the limit`,
    "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd; docker run --ulimit memlock=-1)",
  );
}

/**
 * An agent needs 40 free file descriptors, a peer one to four: below this a few peers are too many.
 */
const FEW_DESCRIPTORS = 512;

function descriptors(host: Host): Check {
  const limit = limitOf(host, "open files");
  const check = finding("machine", "descriptors", "file descriptors", { limit });
  if (limit === undefined) return check("note", "the limit cannot be read");
  if (limit === null || limit >= FEW_DESCRIPTORS) return check("ok", `${limit ?? "unlimited"}`);
  return check(
    "warn",
    `${limit}: an agent needs 40, and each peer up to 4`,
    "ulimit -n 4096 (LimitNOFILE=4096 in systemd; docker run --ulimit nofile=4096)",
  );
}

function ptrace(host: Host): Check {
  const allowed = "processes of one user may read each other's memory";
  const scope = Number(host.text("/proc/sys/kernel/yama/ptrace_scope") ?? Number.NaN);
  const capabilities =
    /^CapEff:\s*([0-9a-f]+)/m.exec(host.text("/proc/self/status") ?? "")?.[1] ?? "0";
  const capable = ((BigInt(`0x${capabilities}`) >> CAP_SYS_PTRACE) & 1n) === 1n;
  const check = finding("machine", "ptrace", "ptrace scope (CMA)", { scope, capable });
  if (Number.isNaN(scope)) return check("ok", `no Yama: ${allowed}`);
  if (scope === 0) return check("ok", `0: ${allowed}`);
  if (capable && scope < 3) return check("ok", `${scope}, and this process has CAP_SYS_PTRACE`);
  return check(
    "warn",
    `${scope}: processes on this host cannot copy from each other (CMA); UCX uses a slower transport`,
    "sysctl -w kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE (docker run --cap-add=SYS_PTRACE)",
  );
}

function sharedMemory(host: Host): Check {
  const space = host.space("/dev/shm");
  const check = finding("machine", "shm", "shared memory", space);
  if (space === undefined) {
    return check(
      "warn",
      "there is no /dev/shm: UCX cannot use shared memory between processes",
      "mount -t tmpfs tmpfs /dev/shm",
    );
  }
  if (!host.writable("/dev/shm")) {
    return check(
      "warn",
      "/dev/shm cannot be written, and UCX does not start",
      "mount -o remount,rw /dev/shm, or UCX_TLS=^posix on both sides",
    );
  }
  const mib = (bytes: number) => `${Math.round(bytes / 2 ** 20)} MiB`;
  const found = `/dev/shm has ${mib(space.freeBytes)} free of ${mib(space.totalBytes)}`;
  if (space.freeBytes > DEFAULT_DOCKER_SHM_BYTES) return check("ok", found);
  return check(
    "warn",
    `${found}: too little for several agents`,
    "enlarge it: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm",
  );
}

function rdma(host: Host, devices: readonly RdmaDevice[], backends: readonly string[]): Check[] {
  if (devices.length === 0) {
    const check = finding("machine", "rdma", "RDMA and EFA devices", { devices });
    return [check("note", "none: transfers to other hosts use TCP")];
  }
  const verbs = host.names("/dev/infiniband").filter((name) => /^uverbs/.test(name));
  const reachable = verbs.some((name) => host.writable(`/dev/infiniband/${name}`));
  const checks = devices.map((device): Check => {
    const { name, efa, link, ports } = device;
    const title = efa ? "EFA device" : "RDMA device";
    const check = finding("machine", `rdma.${name}`, title, { ...device });
    const found = `${name}, ${link}, ports ${ports.join("; ") || "none"}`;
    if (!reachable) {
      return check(
        "warn",
        `${found}; /dev/infiniband/uverbs* cannot be opened here`,
        "give the container access to the devices: docker run --device=/dev/infiniband",
      );
    }
    if (ports.some((state) => state.includes("ACTIVE"))) return check("ok", found);
    return check("warn", `${found}: no port is active`, `see: rdma link show ${name}`);
  });
  if (isEfaOnly(devices) && !backends.includes("LIBFABRIC")) {
    const found = `the devices are EFA, and the backend is ${backends.join(",")}: READ and WRITE would not use EFA`;
    const fix = "NIXL_BACKEND=LIBFABRIC on both sides";
    checks.push(finding("machine", "efa", "EFA with UCX")("warn", found, fix));
  }
  return checks;
}

function gpu(host: Host): Check {
  const nvidia = nvidiaGpus(host.names);
  const neuron = host.names("/dev").filter((name) => /^neuron\d+$/.test(name));
  const found = [
    ...(nvidia.length > 0 ? [`${nvidia.length} NVIDIA`] : []),
    ...(neuron.length > 0 ? [`${neuron.length} Neuron`] : []),
  ];
  return finding("machine", "accelerators", "accelerators", { nvidia, neuron })(
    "note",
    found.join(", ") || "none: KV caches are in DRAM",
  );
}
